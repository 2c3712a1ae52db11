//! A skill on disk: a folder with a `SKILL.md` and what it refers to (agentskills.io).

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The file that makes a folder a skill.
pub const SKILL_FILE: &str = "SKILL.md";

/// Files above this are not read.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Files of one skill, and folders below it, that are looked at.
const FILES_MAX: usize = 1000;
const DEPTH_MAX: usize = 8;

/// A skill, as far as its cost goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skill {
    pub name: String,
    pub description: String,
    /// The whole `SKILL.md`.
    pub text: String,
    /// The other files of its folder, sorted.
    pub references: Vec<Reference>,
}

/// A file of a skill that the model can read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Below the skill's folder.
    pub path: PathBuf,
    /// `Err`: why it has no text.
    pub text: Result<String, String>,
}

#[derive(Deserialize)]
struct FrontMatter {
    name: Option<String>,
    description: Option<String>,
}

impl Skill {
    /// Reads a skill. `Err` names the file and the fault.
    pub fn read(folder: &Path) -> Result<Skill, String> {
        let path = folder.join(SKILL_FILE);
        let fault = |why: &str| format!("{}: {why}", path.display());
        let text = read_text(&path).map_err(|why| fault(&why))?;
        let matter = front_matter(&text).ok_or_else(|| {
            fault("it does not begin with front matter: a line `---`, `name:` and `description:`, and a line `---`")
        })?;
        let matter: FrontMatter = serde_saphyr::from_str(matter).map_err(|error| {
            let why = error.to_string();
            fault(&format!("its front matter is not YAML: {}", why.lines().next().unwrap_or_default()))
        })?;
        let field = |value: Option<String>, name: &str| {
            let value = value.map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
            value.ok_or_else(|| fault(&format!("its front matter has no `{name}`")))
        };
        let (name, description) = (field(matter.name, "name")?, field(matter.description, "description")?);
        let mut references = Vec::new();
        collect(folder, folder, 0, &mut references).map_err(|why| fault(&why))?;
        references.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Skill { name, description, text, references })
    }

    /// What stands in the prompt as long as the skill is not used, without the mark of a list.
    pub fn label(&self) -> String {
        format!("{}: {}", self.name, self.description)
    }

    /// The same as a line of a list.
    pub fn line(&self) -> String {
        format!("- {}", self.label())
    }
}

/// The skills of a folder: itself, or those right below it, sorted. `Err` says why there are none.
pub fn skill_folders(folder: &Path) -> Result<Vec<PathBuf>, String> {
    if folder.join(SKILL_FILE).is_file() {
        return Ok(vec![folder.to_owned()]);
    }
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{} cannot be read: {error}", folder.display()))?;
    let mut found: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.join(SKILL_FILE).is_file()).collect();
    found.sort();
    if found.is_empty() {
        return Err(format!("{} has no {SKILL_FILE}, and no folder right below it has one", folder.display()));
    }
    Ok(found)
}

/// What stands between the first line `---` and the next.
fn front_matter(text: &str) -> Option<&str> {
    let text = text.trim_start_matches('\u{feff}');
    let rest = text.strip_prefix("---\n").or_else(|| text.strip_prefix("---\r\n"))?;
    let mut at = 0;
    for line in rest.split_inclusive('\n') {
        if line.trim_end() == "---" {
            return Some(&rest[..at]);
        }
        at += line.len();
    }
    None
}

/// Files below a folder; links are not followed, hidden ones not looked at.
fn collect(root: &Path, folder: &Path, depth: usize, found: &mut Vec<Reference>) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{} cannot be read: {error}", folder.display()))?;
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(kind) = entry.file_type() else { continue };
        if entry.file_name().to_string_lossy().starts_with('.') || path == root.join(SKILL_FILE) {
            continue;
        }
        if kind.is_dir() && depth < DEPTH_MAX {
            collect(root, &path, depth + 1, found)?;
        } else if kind.is_file() {
            if found.len() >= FILES_MAX {
                return Err(format!("the skill has more than {FILES_MAX} files"));
            }
            let below = path.strip_prefix(root).unwrap_or(&path).to_owned();
            found.push(Reference { path: below, text: read_text(&path) });
        }
    }
    Ok(())
}

fn read_text(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| format!("it cannot be read: {error}"))?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| format!("it cannot be read: {error}"))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("it has more than {} MiB", FILE_BYTES_MAX >> 20));
    }
    String::from_utf8(bytes).map_err(|_| "it is not text (UTF-8)".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skills_are_read_and_bad_ones_are_named() {
        let check = |text: &str, expected: Result<(&str, &str), &str>| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join(SKILL_FILE), text).unwrap();
            match (Skill::read(folder.path()), expected) {
                (Ok(skill), Ok((name, description))) => {
                    assert_eq!((skill.name.as_str(), skill.description.as_str()), (name, description), "{text:?}");
                }
                (Err(why), Err(part)) => assert!(why.contains(part) && why.contains(SKILL_FILE), "{text:?}: {why}"),
                (found, _) => panic!("{text:?}: {found:?}"),
            }
        };
        check("---\nname: a\ndescription: b c\n---\nBody", Ok(("a", "b c")));
        check("\u{feff}---\r\nname: a\r\ndescription: \"b: c\"\r\n---\r\n", Ok(("a", "b: c")));
        check(
            "---\nname: a\ndescription: >\n  dài\n  dòng\nallowed-tools: Bash(git *) Read\n---\n",
            Ok(("a", "dài dòng")),
        );
        check("# A skill", Err("front matter"));
        check("---\nname: a\ndescription: b", Err("front matter"));
        check("---\nname: a\n---\n", Err("no `description`"));
        check("---\nname: [\n---\n", Err("not YAML"));
        check("---\nname: ''\ndescription: b\n---\n", Err("no `name`"));
        check("---\n---\n", Err("no `name`"));
    }

    #[test]
    fn references_are_sorted_and_what_is_no_text_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, bytes: &[u8]| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        write("a/SKILL.md", b"---\nname: a\ndescription: b\n---\n");
        write("a/z.md", b"z");
        write("a/docs/b.md", "chữ".as_bytes());
        write("a/logo.png", &[0xff, 0xfe, 0]);
        write("a/.hidden", b"x");
        write("b/readme.md", b"no skill");
        let folders = skill_folders(folder.path()).unwrap();
        assert_eq!(folders, [folder.path().join("a")]);
        let skill = Skill::read(&folders[0]).unwrap();
        let names: Vec<String> = skill.references.iter().map(|r| r.path.display().to_string()).collect();
        assert_eq!(names, ["docs/b.md", "logo.png", "z.md"]);
        assert_eq!(skill.references[0].text, Ok("chữ".into()));
        assert!(skill.references[1].text.is_err());
        assert!(skill_folders(&folder.path().join("b")).unwrap_err().contains("no SKILL.md"));
    }
}
