//! The user's settings file, `config.toml`: `$COB_HOME/config.toml`, else `$XDG_CONFIG_HOME/cob/config.toml`, else
//! `~/.config/cob/config.toml`. Flags and the environment stand above it.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// What the file may hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model that is used when neither `--model` nor `COB_MODEL` names one.
    pub model: Option<String>,
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
        toml::from_str(&text).map_err(|error| format!("{}: {}", path.display(), error.to_string().trim_end()))
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
        std::fs::write(&file, "modle = \"m\"\n").unwrap();
        let error = Config::read(&file).unwrap_err();
        assert!(error.contains("config.toml: ") && error.contains("unknown field `modle`"), "{error}");
    }
}
