//! Paths as the model writes them, files as it last saw them, and writing that is all or nothing.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use sha2::{Digest, Sha256};

use super::{Stop, ToolContext, text};
use crate::permission;

/// Path → what the model last saw of it. `Edit` and `Write` refuse a file that is no longer that.
#[derive(Default)]
pub struct FileViews {
    /// The fingerprint, and what is known of a file that still has it.
    seen: Mutex<HashMap<PathBuf, (Fingerprint, Seen)>>,
}

/// The SHA-256 of a file's bytes: a touched file is not a changed one, and a change within the clock's step is one.
pub type Fingerprint = [u8; 32];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    Never,
    AsItIs,
    /// It is as it was when a part of it was shown.
    Partly,
    /// It is as `Edit` left it; the whole was not looked at since.
    Edited,
    Otherwise,
}

impl FileViews {
    /// `path`: resolved.
    pub fn note(&self, path: &Path, now: Fingerprint) {
        self.lock().insert(path.to_path_buf(), (now, Seen::AsItIs));
    }

    /// A part was shown; whoever knew the whole of the same file still does.
    pub fn note_part(&self, path: &Path, now: Fingerprint) {
        if self.compare(path, &now) != Seen::AsItIs {
            self.lock().insert(path.to_path_buf(), (now, Seen::Partly));
        }
    }

    pub fn note_edited(&self, path: &Path, now: Fingerprint) {
        self.lock().insert(path.to_path_buf(), (now, Seen::Edited));
    }

    pub fn compare(&self, path: &Path, now: &Fingerprint) -> Seen {
        match self.lock().get(path) {
            None => Seen::Never,
            Some((seen, known)) if seen == now => *known,
            Some(_) => Seen::Otherwise,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, (Fingerprint, Seen)>> {
        self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

pub(super) fn fingerprint(bytes: &[u8]) -> Fingerprint {
    Sha256::digest(bytes).into()
}

pub(super) fn fingerprint_of_file(path: &Path, stop: &Stop) -> Result<Fingerprint, String> {
    let fault = |error| could_not("read", path, error);
    let mut file = File::open(path).map_err(fault)?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; 64 * 1024];
    loop {
        stop.check()?;
        match file.read(&mut chunk).map_err(fault)? {
            0 => return Ok(hash.finalize().into()),
            count => hash.update(&chunk[..count]),
        }
    }
}

/// The absolute path of what the model wrote: relative to the workspace, `~/…`, `file://…`, or absolute. Links are not
/// followed here.
///
/// `Err` also when the path is absolute, leads nowhere, and would be right without its first slash: small models write
/// `/Cargo.toml` for `Cargo.toml`.
pub(super) fn absolute(context: &ToolContext, given: &str) -> Result<PathBuf, String> {
    // A space around a name is a slip of the model's, unless there is such a file.
    let trimmed = given.trim();
    let given = if trimmed != given && context.cwd.join(given).symlink_metadata().is_err() { trimmed } else { given };
    let given = given.strip_prefix("file://").unwrap_or(given);
    if given.trim().is_empty() {
        return Err("The path is empty. Give the path of a file or folder, for example src/main.rs.".into());
    }
    if given.contains('\0') {
        return Err("The path contains a NUL character.".into());
    }
    if given == "~" || given.starts_with("~/") {
        let home = std::env::var_os("HOME").ok_or("The path begins with ~, but there is no home folder.")?;
        return Ok(PathBuf::from(home).join(given[1..].trim_start_matches('/')));
    }
    let path = context.cwd.join(given);
    let relative = given.trim_start_matches('/');
    if Path::new(given).is_absolute() && !relative.is_empty() && path.symlink_metadata().is_err() {
        let meant = context.cwd.join(relative);
        if meant.symlink_metadata().is_ok() {
            return Err(format!("{given} does not exist. To name the one in the workspace, write {relative}."));
        }
    }
    Ok(path)
}

/// As [`absolute`], with links followed: what is really opened.
pub(super) fn resolved(context: &ToolContext, given: &str) -> Result<PathBuf, String> {
    let path = absolute(context, given)?;
    permission::resolve(&path).map_err(|error| could_not("look at", &path, error))
}

/// As the model should write it: relative to the workspace where it is inside.
pub(super) fn shown(context: &ToolContext, path: &Path) -> String {
    let root = permission::resolve(&context.cwd).unwrap_or_else(|_| context.cwd.clone());
    match path.strip_prefix(&root).or_else(|_| path.strip_prefix(&context.cwd)) {
        Ok(inside) if inside.as_os_str().is_empty() => ".".to_string(),
        Ok(inside) => text::name(inside),
        Err(_) => text::name(path),
    }
}

pub(super) fn could_not(verb: &str, path: &Path, error: io::Error) -> String {
    let why = match error.kind() {
        io::ErrorKind::PermissionDenied => "permission denied".to_string(),
        io::ErrorKind::NotFound => "it does not exist".to_string(),
        io::ErrorKind::StorageFull => "the disk is full".to_string(),
        _ => error.to_string(),
    };
    format!("Could not {verb} {}: {why}.", text::name(path))
}

/// The metadata of what is there, or an error that names what the model may have meant. `path`: resolved.
pub(super) fn found(context: &ToolContext, path: &Path) -> Result<Metadata, String> {
    fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => missing(context, path),
        _ => could_not("look at", path, error),
    })
}

/// A regular file, or what to do instead.
pub(super) fn regular(context: &ToolContext, path: &Path) -> Result<Metadata, String> {
    let metadata = found(context, path)?;
    if metadata.is_dir() {
        return Err(format!("{} is a folder, not a file. Use LS to list it.", shown(context, path)));
    }
    if !metadata.is_file() {
        return Err(format!("{} is not a regular file (a device, pipe or socket).", shown(context, path)));
    }
    Ok(metadata)
}

/// "Does not exist", with the nearest names of its folder and files of the same name elsewhere in the workspace.
fn missing(context: &ToolContext, path: &Path) -> String {
    const NAMES_MAX: usize = 3;
    const LOOKED_AT_MAX: usize = 5_000;
    let mut text = format!("{} does not exist.", shown(context, path));
    let Ok(root) = permission::resolve(&context.cwd) else { return text };
    // Names outside the workspace are none of the model's business.
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return text };
    if !folder.starts_with(&root) {
        return text;
    }
    let name = name.to_string_lossy();
    let mut near: Vec<(f64, PathBuf)> = Vec::new();
    if folder.is_dir() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten().take(LOOKED_AT_MAX) {
            let likeness = text::likeness(&entry.file_name().to_string_lossy(), &name);
            if likeness >= 0.5 {
                near.push((likeness, entry.path()));
            }
        }
    } else {
        let gone = folder.ancestors().take_while(|folder| !folder.exists()).last().unwrap_or(folder);
        if gone.parent().is_some_and(Path::is_file) || folder.is_file() {
            text.push_str(" A part of its path is a file, not a folder.");
        } else {
            text.push_str(&format!(" There is no folder {}.", shown(context, gone)));
        }
    }
    let walk = super::walk::entries(&root).take(LOOKED_AT_MAX).flatten();
    near.extend(walk.filter(|entry| entry.file_name() == name.as_ref()).map(|entry| (1.0, entry.into_path())));
    near.sort_by(|(a, a_path), (b, b_path)| b.total_cmp(a).then_with(|| a_path.cmp(b_path)));
    near.dedup_by(|a, b| a.1 == b.1);
    near.truncate(NAMES_MAX);
    match near.is_empty() {
        true => text.push_str(" Use LS or Glob to see what there is."),
        false => {
            let names: Vec<String> = near.iter().map(|(_, path)| shown(context, path)).collect();
            text.push_str(&format!(" Did you mean {}?", names.join(" or ")));
        }
    }
    text
}

/// Puts `bytes` in place of `path` in one step: a reader, or a crash, meets the old file or the new one. Mode and, where
/// we may set them, owner and group stay; hard links to the old file keep the old content.
///
/// `before`: what was there when the new content was made; another file there now is `Err`, and so is any file
/// when there was none.
pub(super) fn replace(path: &Path, bytes: &[u8], before: Option<&Metadata>) -> Result<(), String> {
    let fault = |error| could_not("write", path, error);
    let folder = path.parent().ok_or_else(|| format!("{} is not a file's path.", path.display()))?;
    if before.is_some_and(|metadata| metadata.permissions().readonly()) {
        let why = "it is read-only. Ask the user before its mode is changed";
        return Err(format!("Could not write {}: {why}.", text::name(path)));
    }
    let mut temporary = tempfile::Builder::new()
        .prefix(".cob-")
        .suffix(".tmp")
        // Less the umask, as for any new file.
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(fault)?;
    temporary.write_all(bytes).map_err(fault)?;
    if let Some(before) = before {
        let new = temporary.as_file().metadata().map_err(fault)?;
        if (new.uid(), new.gid()) != (before.uid(), before.gid()) {
            // Only root may give a file away; for anyone else the new file is simply theirs.
            let _ = std::os::unix::fs::fchown(temporary.as_file(), Some(before.uid()), Some(before.gid()));
        }
        temporary.as_file().set_permissions(before.permissions()).map_err(fault)?;
    }
    temporary.as_file().sync_all().map_err(fault)?;
    let changed = || {
        format!(
            "{} was changed by someone else just now, so nothing was written. Read it again and repeat the call.",
            text::name(path)
        )
    };
    match before {
        Some(before) => {
            let same = |now: Metadata| {
                let stamp = |data: &Metadata| (data.ino(), data.len(), data.mtime(), data.mtime_nsec());
                stamp(&now) == stamp(before)
            };
            if !fs::metadata(path).is_ok_and(same) {
                return Err(changed());
            }
            temporary.persist(path).map_err(|error| fault(error.error))?;
        }
        None => {
            temporary.persist_noclobber(path).map_err(|error| match error.error.kind() {
                io::ErrorKind::AlreadyExists => changed(),
                _ => fault(error.error),
            })?;
        }
    }
    // So that the name survives a power cut too; not every file system can.
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    Ok(())
}
