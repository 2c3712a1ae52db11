//! Getting a model: against a local server that speaks the hub's protocol, and a Python that only plays pip.

mod cli;
mod hf;
mod local;
mod pip;
mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use cob::hub::{Folders, Hub, HubError, HubEvent, HubSettings, Limits, Manifest, Pulled};
use server::{FakeHub, REPOSITORY, Served};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

/// Some hundred kilobytes that begin like a GGUF file and do not repeat.
fn model_bytes() -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    let mut x = 1u32;
    while bytes.len() < 300_000 {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn lfs(name: &str, bytes: &[u8]) -> Served {
    Served { name: name.into(), bytes: bytes.into(), oid: Some(sha256(bytes)), etag: String::new(), announced: None }
}

fn git(name: &str, bytes: &[u8]) -> Served {
    Served { name: name.into(), bytes: bytes.into(), oid: None, etag: "a1".repeat(20), announced: None }
}

fn manifest(id: &str, rest: &str) -> Manifest {
    let text = format!(
        "repository = '{REPOSITORY}'\nrevision = 'main'\ncontext_tokens = 32768\nlicence = 'Apache-2.0'\ntested = false\n{rest}"
    );
    Manifest::parse(id, &text).unwrap()
}

/// A GGUF model `tiny` whose digest the manifest knows or not.
fn tiny(digest: Option<&str>) -> Manifest {
    let digest = digest.map_or(String::new(), |d| format!(", sha256 = '{d}'"));
    manifest("tiny", &format!("sources = ['hf']\nfiles = [{{ name = 'tiny.gguf'{digest} }}]"))
}

/// A hub of our own in an empty home.
struct Home {
    dir: tempfile::TempDir,
    settings: HubSettings,
    manifests: Vec<Manifest>,
}

impl Home {
    fn new(server: Option<&FakeHub>, manifests: Vec<Manifest>) -> Home {
        let dir = tempfile::tempdir().unwrap();
        let settings = HubSettings {
            folders: Folders::under(&dir.path().join("home")),
            offline: false,
            // Port 9 of this machine: nobody listens there.
            endpoint: server.map_or("http://127.0.0.1:9".to_string(), FakeHub::endpoint),
            hf_cache: dir.path().join("hf/hub"),
            token: None,
            python: dir.path().join("no-python").into(),
            limits: Limits {
                probe: Duration::from_secs(5),
                stall: Duration::from_secs(20),
                retry_wait: Duration::from_millis(10),
                retries: 3,
            },
        };
        Home { dir, settings, manifests }
    }

    fn hub(&self) -> Hub {
        Hub::with_manifests(self.settings.clone(), self.manifests.clone())
    }

    fn models(&self) -> &Path {
        &self.settings.folders.models
    }

    /// Pulls and returns the notes too.
    fn pull(&self, id: &str) -> (Result<Pulled, HubError>, Vec<String>) {
        self.pull_from(id, None)
    }

    fn pull_from(&self, id: &str, from: Option<&Path>) -> (Result<Pulled, HubError>, Vec<String>) {
        let mut notes = Vec::new();
        let result = self.hub().pull(id, from, &CancellationToken::new(), &mut |event| {
            if let HubEvent::Note(note) = event {
                notes.push(note);
            }
        });
        if let Err(e) = &result {
            assert!(!e.to_string().contains('\n'), "{e}");
        }
        (result, notes)
    }

    /// Everything below the models folder that has a name of its own, without what lies in `.pull`.
    fn visible(&self) -> Vec<String> {
        let mut names: Vec<String> = match std::fs::read_dir(self.models()) {
            Ok(entries) => entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect(),
            Err(_) => Vec::new(),
        };
        names.retain(|name| !name.starts_with('.'));
        names.sort();
        names
    }

    fn staged(&self, name: &str) -> PathBuf {
        self.models().join(".pull/tiny").join(name)
    }
}
