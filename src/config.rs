//! The user's settings file, `config.toml`: `$COB_HOME/config.toml`, else `$XDG_CONFIG_HOME/cob/config.toml`, else
//! `~/.config/cob/config.toml`. Flags and the environment stand above it.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// The model that is used when neither `--model` nor `COB_MODEL` names one.
    pub model: Option<String>,
}

/// What the file may hold.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    model: Option<toml::Spanned<String>>,
}

impl Config {
    /// Reads the user's file; without one, everything is unset. `Err` names the file and its fault.
    pub fn load() -> Result<Config, String> {
        let var = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|value| !value.as_os_str().is_empty());
        match path(var) {
            Some(path) => Config::read(&path),
            None => Ok(Config::default()),
        }
    }

    fn read(path: &Path) -> Result<Config, String> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Config::default()),
            Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
        };
        let fail = |at: usize, why: &str| {
            let before = text.get(..at).unwrap_or(&text);
            let (line, start) = (before.matches('\n').count() + 1, before.rfind('\n').map_or(0, |end| end + 1));
            let column = before[start..].chars().count() + 1;
            let why = why.lines().collect::<Vec<_>>().join(", ");
            format!("{}, line {line}, column {column}: {why}", path.display())
        };
        let file: File =
            toml::from_str(&text).map_err(|error| fail(error.span().map_or(0, |span| span.start), error.message()))?;
        match &file.model {
            Some(model) if model.get_ref().trim().is_empty() => {
                Err(fail(model.span().start, "`model` is empty; name a model, or remove the line"))
            }
            model => Ok(Config { model: model.as_ref().map(|model| model.get_ref().clone()) }),
        }
    }
}

fn path(var: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let folder = match (var("COB_HOME"), var("XDG_CONFIG_HOME").filter(|path| path.is_absolute()), var("HOME")) {
        (Some(home), ..) => home,
        (None, Some(config), _) => config.join("cob"),
        (None, None, Some(home)) => home.join(".config/cob"),
        (None, None, None) => return None,
    };
    Some(folder.join("config.toml"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_file_lies() {
        let check = |vars: &[(&str, &str)], expected: Option<&str>| {
            let var = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value));
            assert_eq!(path(var), expected.map(PathBuf::from), "{vars:?}");
        };
        check(&[], None);
        check(&[("HOME", "/h")], Some("/h/.config/cob/config.toml"));
        check(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/x")], Some("/x/cob/config.toml"));
        check(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "x")], Some("/h/.config/cob/config.toml"));
        check(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/x"), ("COB_HOME", "/c")], Some("/c/config.toml"));
    }

    #[test]
    fn what_the_file_says() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        assert_eq!(Config::read(&file), Ok(Config::default()));
        std::fs::write(&file, "model = \"m\"\n").unwrap();
        assert_eq!(Config::read(&file).unwrap().model.as_deref(), Some("m"));
        let check = |text: &str, expected: &str| {
            std::fs::write(&file, text).unwrap();
            let error = Config::read(&file).unwrap_err();
            assert!(error.starts_with(file.to_str().unwrap()) && error.lines().count() == 1, "{text:?}: {error:?}");
            assert!(error.contains(expected), "{text:?}: {error}");
        };
        check("modle = \"m\"\n", "config.toml, line 1, column 1: unknown field `modle`");
        check("# mô hình\nmodel = 1\n", "config.toml, line 2, column 9: invalid type");
        check("model = \"m\n", "config.toml, line 1, column ");
        check("# một\n\nmodel = \"\"\n", "config.toml, line 3, column 9: `model` is empty");
        check("model = \" \"\n", "`model` is empty");
        check("model = ", "config.toml, line 1, column ");
    }
}
