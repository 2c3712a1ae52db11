//! Model files on disk: what is known of them, getting them, checking them.
//!
//! [`Hub`] is the whole face. It prints nothing: what happens is told through [`HubEvent`]s, and every failure is one
//! [`HubError`] whose text is one line that says what to do. A file gets its final name only after its digest was
//! compared, by a rename; whatever is unfinished lies below `models/.pull`.

mod folders;
mod hf;
mod manifest;
mod memory;
mod pip;
mod pull;
mod record;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;

pub use folders::Folders;
pub use manifest::{DEFAULT_MODEL, Manifest, ManifestFile, Pip, Source, embedded};
pub use memory::{available_bytes, memory_check};
pub use pull::Pulled;
pub use record::{Checked, FileRecord, Record, Stamp};

use crate::message::Habits;
use record::hash_file;

/// What this room needs to know of its surroundings. Deliberately without `Debug`: it holds a token.
#[derive(Clone)]
pub struct HubSettings {
    pub folders: Folders,
    /// Nothing is fetched; files that are already here, in the user's hub cache too, are used.
    pub offline: bool,
    /// Without a slash at its end.
    pub endpoint: String,
    /// The user's hub cache (`…/huggingface/hub`); only read.
    pub hf_cache: PathBuf,
    pub token: Option<String>,
    /// The Python that runs pip.
    pub python: OsString,
    pub limits: Limits,
}

/// How long the network is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For the hub's first answer, redirects and name resolution included.
    pub probe: Duration,
    /// Without a byte during a download.
    pub stall: Duration,
    /// Before a download that broke off is tried again.
    pub retry_wait: Duration,
    /// Tries in a row that brought no byte.
    pub retries: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            probe: Duration::from_secs(9),
            stall: Duration::from_secs(30),
            retry_wait: Duration::from_secs(1),
            retries: 3,
        }
    }
}

impl HubSettings {
    /// From the environment: `COB_HOME` or XDG; `HF_ENDPOINT`; `HF_HUB_CACHE`, `HF_HOME`; `HF_TOKEN`, else the file
    /// that the hub's own tools keep it in; `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// When there is no home folder at all.
    pub fn from_env() -> Result<HubSettings, HubError> {
        let var = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let folders = Folders::from_env()?;
        let hf_cache = match (var("HF_HUB_CACHE"), var("HF_HOME"), std::env::home_dir()) {
            (Some(cache), ..) => PathBuf::from(cache),
            (None, Some(home), _) => PathBuf::from(home).join("hub"),
            (None, None, Some(home)) => home.join(".cache/huggingface/hub"),
            (None, None, None) => folders.models.join(".no-hub-cache"),
        };
        let token = var("HF_TOKEN").or_else(|| hf_hub::Cache::new(hf_cache.clone()).token());
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        Ok(HubSettings {
            folders,
            offline: var("HF_HUB_OFFLINE")
                .is_some_and(|v| matches!(v.to_lowercase().as_str(), "1" | "true" | "yes" | "on")),
            endpoint: endpoint.trim_end_matches('/').to_string(),
            hf_cache,
            token: token.map(|t| t.trim().to_string()),
            python: "python3".into(),
            limits: Limits::default(),
        })
    }
}

/// Something that is worth showing while a call of [`Hub`] goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HubEvent<'a> {
    /// One line.
    Note(String),
    /// `what` is a phrase like "fetching NAME from hf"; it changes when another piece of work begins.
    Progress { what: &'a str, bytes_done: u64, bytes_total: Option<u64> },
}

/// Called in order on the caller's thread, some thousand times a gigabyte; it should be quick.
pub type Events<'a> = &'a mut dyn FnMut(HubEvent);

/// A failure: one line that says what happened and what to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubError {
    pub kind: Kind,
    text: String,
}

/// What a caller may want to tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// No such model, file or folder.
    Unknown,
    NotInstalled,
    /// It would have to be fetched, and `offline` forbids it.
    Offline,
    /// No source could be reached.
    Unreachable,
    WrongDigest,
    DiskFull,
    /// Another process is fetching it.
    Busy,
    NoMemory,
    Cancelled,
    Failed,
}

impl HubError {
    pub(crate) fn new(kind: Kind, text: impl Into<String>) -> HubError {
        // One line, whatever a server or a child wrote.
        let text: String = text.into();
        HubError {
            kind,
            text: text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" "),
        }
    }

    /// `what` is a phrase like "cannot write"; a full disk is recognised.
    pub(crate) fn io(what: &str, path: &Path, e: std::io::Error) -> HubError {
        if matches!(e.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) {
            return HubError::new(
                Kind::DiskFull,
                format!(
                    "the disk is full: {what} {}; free some space, or set COB_HOME to a folder on another disk",
                    path.display()
                ),
            );
        }
        HubError::new(Kind::Failed, format!("{what} {}: {e}", path.display()))
    }
}

impl std::fmt::Display for HubError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for HubError {}

/// Which of the four places named the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Environment,
    Config,
    Default,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Origin::Flag => "--model",
            Origin::Environment => "COB_MODEL",
            Origin::Config => "the config",
            Origin::Default => "the default",
        })
    }
}

/// What [`Hub::resolve`] found.
#[derive(Clone, Debug, PartialEq)]
pub enum Resolved {
    Ready(Model),
    NeedsPull(NeedsPull),
}

/// A model that is on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The manifest's id, or for another file its stem.
    pub id: String,
    pub origin: Origin,
    pub format: Format,
    /// The GGUF file or the safetensors folder.
    pub path: PathBuf,
    /// The files the digest is of.
    pub files: Vec<PathBuf>,
    pub bytes: u64,
    /// Also of a file elsewhere whose digest is that of a known model.
    pub manifest: Option<Manifest>,
    /// SHA-256 in hexadecimal; see [`Record::digest`] for a folder.
    pub digest: String,
}

impl Model {
    /// How the loop treats it: by its manifest, else plainly.
    pub fn habits(&self) -> Habits {
        self.manifest.as_ref().map(|manifest| manifest.agent).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Gguf,
    Safetensors,
}

/// A known model that is not on disk yet.
#[derive(Clone, Debug, PartialEq)]
pub struct NeedsPull {
    pub id: String,
    pub origin: Origin,
    pub manifest: Manifest,
    /// What the manifest knows of, of all files together.
    pub bytes_total: u64,
    /// Whether [`NeedsPull::bytes_total`] counts every file.
    pub bytes_complete: bool,
    /// Already here from a pull that was interrupted.
    pub bytes_have: u64,
}

impl NeedsPull {
    /// "1.12 GB", with "about" when a small file's size is not known.
    pub fn size(&self) -> String {
        let about = if self.bytes_complete { "" } else { "about " };
        format!("{about}{}", human_bytes(self.bytes_total))
    }
}

/// One file as [`Hub::verify`] found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedFile {
    pub path: PathBuf,
    pub sha256: String,
    /// From the manifest, else from the pull.
    pub expected: Option<String>,
    pub ok: bool,
}

/// Known models, and those of them that are here.
pub struct Hub {
    settings: HubSettings,
    manifests: Vec<Manifest>,
}

impl Hub {
    pub fn new(settings: HubSettings) -> Hub {
        Hub::with_manifests(settings, embedded())
    }

    /// With other manifests than the built-in ones.
    pub fn with_manifests(settings: HubSettings, manifests: Vec<Manifest>) -> Hub {
        Hub { settings, manifests }
    }

    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    pub fn manifests(&self) -> &[Manifest] {
        &self.manifests
    }

    /// # Errors
    /// [`Kind::Unknown`], with the nearest ids.
    pub fn manifest(&self, id: &str) -> Result<&Manifest, HubError> {
        self.manifests.iter().find(|m| m.id == id).ok_or_else(|| self.unknown(id))
    }

    fn unknown(&self, id: &str) -> HubError {
        let near = manifest::nearest(id, self.manifests.iter().map(|m| m.id.as_str()));
        let near = if near.is_empty() { String::new() } else { format!("the nearest are {}; ", near.join(", ")) };
        HubError::new(Kind::Unknown, format!("there is no model `{id}`; {near}`cob model list` shows all"))
    }

    /// Whether all files are here, as large as the manifest says. The digest is not looked at.
    pub fn is_installed(&self, manifest: &Manifest) -> bool {
        let paths = manifest.file_paths_in(&self.settings.folders.models);
        manifest.files.iter().zip(paths).all(|(file, path)| {
            std::fs::metadata(path)
                .is_ok_and(|meta| meta.is_file() && file.bytes.is_none_or(|bytes| bytes == meta.len()))
        })
    }

    /// Whether all files are here, whatever their size: what [`Hub::verify`] can look at.
    pub fn is_present(&self, manifest: &Manifest) -> bool {
        manifest.file_paths_in(&self.settings.folders.models).iter().all(|path| path.is_file())
    }

    /// Fails when a file of the model is here and is too short or too long, as after a copy that broke off.
    fn wrong_size(&self, manifest: &Manifest) -> Result<(), HubError> {
        let id = &manifest.id;
        for (file, path) in manifest.files.iter().zip(manifest.file_paths_in(&self.settings.folders.models)) {
            let found = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file).map(|meta| meta.len());
            if let (Some(found), Some(expected)) = (found, file.bytes)
                && found != expected
            {
                let text = format!(
                    "{} has {found} bytes, expected {expected}; `cob model pull {id}` fetches it again, \
                     `cob model verify {id}` looks closer",
                    path.display()
                );
                return Err(HubError::new(Kind::WrongDigest, text));
            }
        }
        Ok(())
    }

    /// The path of an installed model.
    ///
    /// # Errors
    /// [`Kind::Unknown`], [`Kind::NotInstalled`], or [`Kind::WrongDigest`] when a file has the wrong size.
    pub fn path(&self, id: &str) -> Result<PathBuf, HubError> {
        let manifest = self.manifest(id)?;
        self.wrong_size(manifest)?;
        if !self.is_installed(manifest) {
            return Err(self.not_installed(id));
        }
        Ok(manifest.path_in(&self.settings.folders.models))
    }

    fn not_installed(&self, id: &str) -> HubError {
        HubError::new(Kind::NotInstalled, format!("`{id}` is not installed; `cob model pull {id}` fetches it"))
    }

    /// Which model is meant: the flag, else the environment, else the config, else [`DEFAULT_MODEL`]. A value is an id,
    /// the path of a GGUF file, or a folder with safetensors.
    ///
    /// The digest comes from the record beside the model; the first time, and when the file has changed since, it is
    /// taken (seconds a gigabyte, told through `events`).
    ///
    /// # Errors
    /// [`Kind::Unknown`] for what is no model; [`Kind::WrongDigest`] for an installed model that is damaged.
    pub fn resolve(
        &self,
        flag: Option<&str>,
        environment: Option<&str>,
        config: Option<&str>,
        cancel: &CancellationToken,
        events: Events,
    ) -> Result<Resolved, HubError> {
        let named = [(flag, Origin::Flag), (environment, Origin::Environment), (config, Origin::Config)];
        let (value, origin) = named
            .into_iter()
            .find_map(|(value, origin)| Some((value.filter(|v| !v.is_empty())?, origin)))
            .unwrap_or((DEFAULT_MODEL, Origin::Default));
        let Some(manifest) = self.manifests.iter().find(|m| m.id == value) else {
            let model = self.resolve_path(value, origin, cancel, events);
            return model.map(Resolved::Ready).map_err(|e| HubError::new(e.kind, format!("{origin}: {e}")));
        };
        let models = &self.settings.folders.models;
        self.wrong_size(manifest)?;
        if !self.is_installed(manifest) {
            let (bytes_total, bytes_complete) = manifest.bytes();
            return Ok(Resolved::NeedsPull(NeedsPull {
                id: manifest.id.clone(),
                origin,
                manifest: manifest.clone(),
                bytes_total,
                bytes_complete,
                bytes_have: pull::bytes_have(&self.settings.folders, manifest),
            }));
        }
        let path = manifest.path_in(models);
        let files = manifest.file_paths_in(models);
        let record = self.record_of(&record_path(&path), &files, Some(manifest), cancel, events)?;
        Ok(Resolved::Ready(Model {
            id: manifest.id.clone(),
            origin,
            format: if manifest.is_folder() { Format::Safetensors } else { Format::Gguf },
            path,
            files,
            bytes: record.files.iter().map(|file| file.stamp.bytes).sum(),
            manifest: Some(manifest.clone()),
            digest: record.digest(),
        }))
    }

    /// The model that an id or a path names, where it is on disk already.
    ///
    /// # Errors
    /// [`Kind::NotInstalled`], and those of [`Hub::resolve`].
    pub fn installed(&self, name: &str) -> Result<Model, HubError> {
        match self.resolve(Some(name), None, None, &CancellationToken::new(), &mut |_| {})? {
            Resolved::Ready(model) => Ok(model),
            Resolved::NeedsPull(missing) => Err(HubError::new(
                Kind::NotInstalled,
                format!("{0} is not here; fetch it with `cob model pull {0}`", missing.id),
            )),
        }
    }

    fn resolve_path(
        &self,
        value: &str,
        origin: Origin,
        cancel: &CancellationToken,
        events: Events,
    ) -> Result<Model, HubError> {
        let path = Path::new(value);
        let unknown = |why: &str| Err(HubError::new(Kind::Unknown, format!("{} {why}", path.display())));
        let name =
            |os: Option<&std::ffi::OsStr>| os.map_or_else(|| value.to_string(), |n| n.to_string_lossy().into_owned());
        let (id, format, files) = if path.is_dir() {
            let files = safetensors_files(path);
            if !files.iter().any(|f| f.extension().is_some_and(|ext| ext == "safetensors"))
                || !path.join("config.json").is_file()
            {
                return unknown(
                    "is a folder without config.json and *.safetensors; give a GGUF file or a safetensors folder",
                );
            }
            (name(path.canonicalize().unwrap_or_default().file_name()), Format::Safetensors, files)
        } else if path.is_file() {
            let mut magic = [0u8; 4];
            let read = std::fs::File::open(path).and_then(|mut f| std::io::Read::read_exact(&mut f, &mut magic));
            if let Err(e) = read
                && e.kind() != std::io::ErrorKind::UnexpectedEof
            {
                return Err(HubError::io("cannot read", path, e));
            }
            if &magic != b"GGUF" {
                return unknown("is not a GGUF file; give a GGUF file, or the folder of a safetensors model");
            }
            (name(path.file_stem()), Format::Gguf, vec![path.to_path_buf()])
        } else if path.exists() {
            return unknown("is not a regular file; give a GGUF file, or the folder of a safetensors model");
        } else if value.contains(std::path::is_separator) || value.ends_with(".gguf") {
            return unknown(
                "does not exist; give the path of a GGUF file or of a safetensors folder, or an id of `cob model list`",
            );
        } else {
            return Err(self.unknown(value));
        };
        let record = self.record_of(&self.foreign_record_path(path), &files, None, cancel, events)?;
        let digest = record.digest();
        // The same bytes elsewhere are the same model, so that what was measured for it holds.
        let known =
            self.manifests.iter().find(|m| matches!(m.files.as_slice(), [f] if f.sha256.as_ref() == Some(&digest)));
        Ok(Model {
            id: known.map_or(id, |m| m.id.clone()),
            origin,
            format,
            path: path.to_path_buf(),
            files,
            bytes: record.files.iter().map(|file| file.stamp.bytes).sum(),
            manifest: known.cloned(),
            digest,
        })
    }

    /// Fetches a model, or finds that it is here already; `from` is a file (or folder) to take it from instead of the
    /// manifest's sources. Interrupted, it resumes at the next call where the source can.
    ///
    /// # Errors
    /// Every [`Kind`] but [`Kind::NoMemory`] and [`Kind::NotInstalled`].
    pub fn pull(
        &self,
        id: &str,
        from: Option<&Path>,
        cancel: &CancellationToken,
        events: Events,
    ) -> Result<Pulled, HubError> {
        pull::pull(self, self.manifest(id)?, from, cancel, events)
    }

    /// Hashes an installed model again and compares.
    ///
    /// # Errors
    /// [`Kind::Unknown`], [`Kind::NotInstalled`], [`Kind::Cancelled`], or a file that cannot be read. A wrong digest is
    /// not an error here but a [`VerifiedFile`] that is not `ok`.
    pub fn verify(&self, id: &str, cancel: &CancellationToken, events: Events) -> Result<Vec<VerifiedFile>, HubError> {
        let manifest = self.manifest(id)?;
        let models = &self.settings.folders.models;
        let paths = manifest.file_paths_in(models);
        // A file of a wrong size is a finding, so presence alone counts here.
        if !self.is_present(manifest) {
            return Err(self.not_installed(id));
        }
        let record_path = record_path(&manifest.path_in(models));
        let old = Record::load(&record_path);
        let mut verified = Vec::new();
        let mut files = Vec::new();
        for (file, path) in manifest.files.iter().zip(paths) {
            let recorded = old.as_ref().and_then(|r| r.files.iter().find(|f| f.name == file.name));
            let stamp = stamp(&path)?;
            let what = format!("checking {}", file.name);
            let sha256 = hash_file(&path, cancel, &mut |done| {
                events(HubEvent::Progress { what: &what, bytes_done: done, bytes_total: Some(stamp.bytes) });
            })?;
            let expected = file.sha256.clone().or_else(|| recorded.map(|r| r.sha256.clone()));
            let ok = expected.as_ref().is_none_or(|e| *e == sha256);
            let checked = match (&file.sha256, recorded) {
                (Some(_), _) => Checked::Manifest,
                (None, Some(r)) => r.checked,
                (None, None) => Checked::Nothing,
            };
            files.push(FileRecord { name: file.name.clone(), sha256: sha256.clone(), checked, stamp });
            verified.push(VerifiedFile { path, sha256, expected, ok });
        }
        if verified.iter().all(|file| file.ok) {
            let found = Record { source: "found on disk".into(), repository: None, revision: None, files: Vec::new() };
            self.save_record(&Record { files, ..old.unwrap_or(found) }, &record_path, events);
        }
        Ok(verified)
    }

    /// Removes a model with its record and whatever an interrupted pull left; returns the paths and the bytes of them.
    ///
    /// # Errors
    /// [`Kind::Unknown`]; [`Kind::NotInstalled`] when there is nothing; [`Kind::Busy`] while it is being fetched.
    pub fn remove(&self, id: &str) -> Result<(Vec<PathBuf>, u64), HubError> {
        let manifest = self.manifest(id)?;
        pull::remove(self, manifest)
    }

    /// What is known of a model, as label and JSON value. `value` is an id or a path.
    ///
    /// # Errors
    /// [`Kind::Unknown`]; a digest that has to be taken can fail as in [`Hub::resolve`].
    pub fn info_lines(
        &self,
        value: &str,
        cancel: &CancellationToken,
        events: Events,
    ) -> Result<Vec<(&'static str, Value)>, HubError> {
        let (manifest, path, record) = match self.resolve(Some(value), None, None, cancel, events)? {
            Resolved::NeedsPull(needs) => (Some(needs.manifest), None, None),
            Resolved::Ready(model) => {
                let installed = model.manifest.as_ref().map(|m| m.path_in(&self.settings.folders.models));
                let record = if installed.as_ref() == Some(&model.path) {
                    record_path(&model.path)
                } else {
                    self.foreign_record_path(&model.path)
                };
                (model.manifest, Some((model.path, model.bytes, model.digest)), Record::load(&record))
            }
        };
        let mut lines = Vec::new();
        if let Some(m) = &manifest {
            let sources: Vec<String> = m.sources.iter().map(Source::to_string).collect();
            lines.push(("id", m.id.clone().into()));
            lines.push(("repository", m.repository.clone().into()));
            lines.push(("revision", m.revision.clone().into()));
            lines.push(("licence", m.licence.clone().into()));
            lines.push(("context tokens", m.context_tokens.into()));
            lines.push(("sources", sources.into()));
            lines.push(("tested", m.tested.into()));
        }
        match path {
            None => {
                let (bytes, complete) = manifest.as_ref().map_or((0, false), Manifest::bytes);
                let about = if complete { "" } else { "about " };
                lines.push(("installed", false.into()));
                lines.push(("to fetch", format!("{about}{}", human_bytes(bytes)).into()));
            }
            Some((path, bytes, digest)) => {
                lines.push(("path", path.display().to_string().into()));
                lines.push(("bytes", bytes.into()));
                lines.push(("sha256", digest.into()));
                if let Some(record) = record {
                    if let Some(revision) = &record.revision {
                        lines.push(("fetched revision", revision.clone().into()));
                    }
                    let checked: Vec<String> =
                        record.files.iter().map(|f| format!("{} against {}", f.name, f.checked.as_str())).collect();
                    lines.push(("came from", record.source.into()));
                    lines.push(("checked", checked.join(", ").into()));
                }
            }
        }
        Ok(lines)
    }

    /// The record of files that are here: the kept one where the files are still the same, else hashed now and kept.
    ///
    /// # Errors
    /// [`Kind::WrongDigest`] when the manifest knows a digest and the file has another one.
    fn record_of(
        &self,
        record_path: &Path,
        files: &[PathBuf],
        manifest: Option<&Manifest>,
        cancel: &CancellationToken,
        events: Events,
    ) -> Result<Record, HubError> {
        let old = Record::load(record_path);
        let mut fresh = Vec::new();
        let mut changed = old.as_ref().is_none_or(|r| r.files.len() != files.len());
        for path in files {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let stamp = stamp(path)?;
            let kept = old.as_ref().and_then(|r| r.files.iter().find(|f| f.name == name));
            let expected =
                manifest.and_then(|m| m.files.iter().find(|f| f.name == name)).and_then(|f| f.sha256.as_ref());
            let file = match kept {
                Some(kept) if kept.stamp == stamp => kept.clone(),
                _ => {
                    changed = true;
                    let what = format!("checking {name}");
                    let sha256 = hash_file(path, cancel, &mut |done| {
                        events(HubEvent::Progress { what: &what, bytes_done: done, bytes_total: Some(stamp.bytes) });
                    })?;
                    let checked = if expected.is_some() {
                        Checked::Manifest
                    } else {
                        kept.filter(|k| k.sha256 == sha256).map_or(Checked::Nothing, |k| k.checked)
                    };
                    FileRecord { name, sha256, checked, stamp }
                }
            };
            if let (Some(m), Some(expected)) = (manifest, expected)
                && *expected != file.sha256
            {
                return Err(HubError::new(
                    Kind::WrongDigest,
                    format!(
                        "{} is damaged (sha256 {}, expected {expected}); `cob model pull {}` fetches it again",
                        path.display(),
                        file.sha256,
                        m.id
                    ),
                ));
            }
            fresh.push(file);
        }
        let same = |r: &Record| fresh.iter().all(|f| r.files.iter().any(|o| o.name == f.name && o.sha256 == f.sha256));
        let record = match old {
            Some(old) if same(&old) => Record { files: fresh, ..old },
            _ => Record { source: "found on disk".into(), repository: None, revision: None, files: fresh },
        };
        if changed {
            self.save_record(&record, record_path, events);
        }
        Ok(record)
    }

    /// A record that cannot be kept costs time at the next start, nothing more; it is said.
    fn save_record(&self, record: &Record, path: &Path, events: Events) {
        if let Err(e) = record.save(path) {
            let note = format!("the digest cannot be kept in {} ({e}); it is taken again next time", path.display());
            events(HubEvent::Note(note));
        }
    }

    /// A user's own file gets no record beside it: that is kept in our folder, under a name made of the file's path.
    fn foreign_record_path(&self, path: &Path) -> PathBuf {
        use sha2::Digest;
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let name = record::hex(&sha2::Sha256::digest(path.as_os_str().as_encoded_bytes())[..12]);
        self.settings.folders.models.join(".digests").join(format!("{name}.json"))
    }
}

/// `<model>.json` beside the file or folder.
fn record_path(model: &Path) -> PathBuf {
    let mut name = model.as_os_str().to_os_string();
    name.push(".json");
    PathBuf::from(name)
}

fn stamp(path: &Path) -> Result<Stamp, HubError> {
    std::fs::metadata(path).map(|meta| Stamp::of(&meta)).map_err(|e| HubError::io("cannot read", path, e))
}

/// The files of a safetensors folder that decide what the model is, sorted.
fn safetensors_files(folder: &Path) -> Vec<PathBuf> {
    const SMALL: [&str; 5] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
    ];
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let small = path.file_name().is_some_and(|name| SMALL.iter().any(|s| name == *s));
            path.is_file() && (small || path.extension().is_some_and(|ext| ext == "safetensors"))
        })
        .collect();
    files.sort();
    files
}

/// Decimal, as disks and downloads are counted: `1.12 GB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    // 999.95 would be printed as 1000.0.
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if unit >= 2 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_readable() {
        let check = |bytes: u64, expected: &str| assert_eq!(human_bytes(bytes), expected);
        check(0, "0 B");
        check(999, "999 B");
        check(1_000, "1.0 kB");
        check(491_400_064, "491 MB");
        check(999_999_999, "1.00 GB");
        check(1_117_320_768, "1.12 GB");
        check(u64::MAX, "18446744.07 TB");
    }

    #[test]
    fn an_error_is_one_line() {
        assert_eq!(HubError::new(Kind::Failed, "a\n  b\r\nc").to_string(), "a b c");
        let full = std::io::Error::from_raw_os_error(libc::ENOSPC);
        assert_eq!(HubError::io("cannot write", Path::new("/x"), full).kind, Kind::DiskFull);
    }
}
