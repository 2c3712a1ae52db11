//! Digests, and the record beside a model that remembers them.
//!
//! Hashing a gigabyte takes seconds, so a digest is taken once and kept with the size, the modification time and the
//! inode of the file it was taken of; if one of them differs, the digest counts as unknown.

use std::fs::{File, Metadata};
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

use super::{HubError, Kind};

/// What is known of a model on disk; the file `<model>.json` beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// `hf`, `hf cache`, `pip`, `file`, or `found on disk` when the file was there before this program looked.
    pub source: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// The commit where the hub named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    pub files: Vec<FileRecord>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub name: String,
    pub sha256: String,
    pub checked: Checked,
    #[serde(flatten)]
    pub stamp: Stamp,
}

/// What a file's digest was compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Checked {
    Manifest,
    /// The LFS oid that the hub answered with.
    Hub,
    /// The hub lists no SHA-256 for a plain git file; only the size was compared.
    Size,
    /// Nothing to compare with.
    Nothing,
}

impl Checked {
    pub fn as_str(self) -> &'static str {
        match self {
            Checked::Manifest => "the manifest",
            Checked::Hub => "the hub",
            Checked::Size => "its size only",
            Checked::Nothing => "nothing",
        }
    }
}

/// What tells that a file is still the one that was hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub bytes: u64,
    pub mtime_ns: i64,
    /// 0 where there are no inodes.
    pub inode: u64,
}

impl Stamp {
    pub fn of(meta: &Metadata) -> Stamp {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let mtime_ns = meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec());
            Stamp { bytes: meta.len(), mtime_ns, inode: meta.ino() }
        }
        #[cfg(not(unix))]
        {
            let since = meta.modified().ok().and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
            Stamp { bytes: meta.len(), mtime_ns: since.map_or(0, |d| d.as_nanos() as i64), inode: 0 }
        }
    }
}

impl Record {
    /// `None` when there is none, or none that can be read: the files are then hashed again.
    pub fn load(path: &Path) -> Option<Record> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }

    /// Atomic: a reader sees the old record or the new one.
    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(std::io::Error::other)?;
        write_atomically(path, &text)
    }

    /// The digest of the model these files are: of one file its SHA-256, of several the SHA-256 of the lines
    /// `<sha256>  <name>\n` in the order of their names, as `sha256sum` prints them.
    pub fn digest(&self) -> String {
        if let [one] = self.files.as_slice() {
            return one.sha256.clone();
        }
        let mut lines: Vec<(&str, &str)> = self.files.iter().map(|f| (f.name.as_str(), f.sha256.as_str())).collect();
        lines.sort();
        let mut hasher = Sha256::new();
        for (name, sha256) in lines {
            hasher.update(format!("{sha256}  {name}\n"));
        }
        hex(&hasher.finalize())
    }
}

/// Writes beside `path` and renames, so that `path` never holds half of it.
pub(super) fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".record");
    // As readable as any other file: a temporary one is the user's alone by default.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

/// The SHA-256 of a file in lowercase hexadecimal; `progress` gets the bytes hashed so far.
///
/// # Errors
/// When it cannot be read, or `cancel` fires.
pub(super) fn hash_file(
    path: &Path,
    cancel: &CancellationToken,
    progress: &mut dyn FnMut(u64),
) -> Result<String, HubError> {
    let failed = |e: std::io::Error| HubError::io("cannot read", path, e);
    let mut file = File::open(path).map_err(failed)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut done = 0u64;
    loop {
        if cancel.is_cancelled() {
            return Err(HubError::new(Kind::Cancelled, "cancelled"));
        }
        let n = match file.read(&mut buffer) {
            Ok(0) => return Ok(hex(&hasher.finalize())),
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(failed(e)),
        };
        hasher.update(&buffer[..n]);
        done += n as u64;
        progress(done);
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_a_round_trip_and_garbage_is_no_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/模型.gguf.json");
        let stamp = Stamp { bytes: 3, mtime_ns: -5, inode: 7 };
        let file = |name: &str| FileRecord { name: name.into(), sha256: "ab".repeat(32), checked: Checked::Hub, stamp };
        let mut record = Record {
            source: "hf".into(),
            repository: None,
            revision: Some("c".into()),
            files: vec![file("模型.gguf")],
        };
        record.save(&path).unwrap();
        assert_eq!(Record::load(&path), Some(record.clone()));
        assert_eq!(record.digest(), "ab".repeat(32));

        // The digest of several files does not depend on their order.
        record.files = vec![file("b"), file("a")];
        let digest = record.digest();
        record.files.reverse();
        assert_eq!(record.digest(), digest);

        std::fs::write(&path, "{\"source\":").unwrap();
        assert_eq!(Record::load(&path), None);
    }

    #[test]
    fn hashing_is_sha256_and_can_be_cancelled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        let cancel = CancellationToken::new();
        let mut seen = 0;
        let digest = hash_file(&path, &cancel, &mut |done| seen = done).unwrap();
        assert_eq!(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(seen, 3);
        cancel.cancel();
        assert_eq!(hash_file(&path, &cancel, &mut |_| ()).unwrap_err().kind, Kind::Cancelled);
    }
}
