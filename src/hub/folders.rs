//! Where things lie: `COB_HOME`, else the XDG folders.

use std::path::{Path, PathBuf};

/// The folders of this program. Nothing is created here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folders {
    /// Model files, and `.pull`, where unfinished downloads lie.
    pub models: PathBuf,
    /// Snapshots of KV caches.
    pub kv: PathBuf,
    /// `ID.jsonl`, one file a session.
    pub sessions: PathBuf,
}

impl Folders {
    /// From the environment of this process.
    ///
    /// # Errors
    /// When neither `COB_HOME` nor `HOME` is set.
    pub fn from_env() -> Result<Folders, super::HubError> {
        Folders::from_vars(|name| std::env::var_os(name).map(PathBuf::from)).ok_or_else(|| {
            super::HubError::new(
                super::Kind::Failed,
                "no folder for models and sessions: neither COB_HOME nor HOME is set; set COB_HOME to a folder",
            )
        })
    }

    /// Everything below one folder, as `COB_HOME` does it.
    pub fn under(home: &Path) -> Folders {
        Folders { models: home.join("models"), kv: home.join("kv"), sessions: home.join("sessions") }
    }

    /// `None` when there is no home to derive a folder from. The XDG specification says that a relative path in one of
    /// its variables is to be ignored; an empty variable counts as unset everywhere.
    fn from_vars(var: impl Fn(&str) -> Option<PathBuf>) -> Option<Folders> {
        let set = |name: &str| var(name).filter(|value| !value.as_os_str().is_empty());
        if let Some(home) = set("COB_HOME") {
            return Some(Folders::under(&home));
        }
        let xdg = |name: &str, default: &str| {
            set(name).filter(|p| p.is_absolute()).or_else(|| Some(set("HOME")?.join(default))).map(|p| p.join("cob"))
        };
        let cache = xdg("XDG_CACHE_HOME", ".cache")?;
        let state = xdg("XDG_STATE_HOME", ".local/state")?;
        Some(Folders { models: cache.join("models"), kv: cache.join("kv"), sessions: state.join("sessions") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_follow_the_variables() {
        let check = |vars: &[(&str, &str)], expected: Option<[&str; 3]>| {
            let found = Folders::from_vars(|name| {
                vars.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value))
            });
            let expected = expected.map(|[models, kv, sessions]| Folders {
                models: models.into(),
                kv: kv.into(),
                sessions: sessions.into(),
            });
            assert_eq!(found, expected, "{vars:?}");
        };
        check(&[("COB_HOME", "/c"), ("HOME", "/h")], Some(["/c/models", "/c/kv", "/c/sessions"]));
        check(&[("HOME", "/h")], Some(["/h/.cache/cob/models", "/h/.cache/cob/kv", "/h/.local/state/cob/sessions"]));
        check(
            &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("XDG_STATE_HOME", "/s"), ("COB_HOME", "")],
            Some(["/x/cob/models", "/x/cob/kv", "/s/cob/sessions"]),
        );
        check(
            &[("HOME", "/h"), ("XDG_CACHE_HOME", "relative")],
            Some(["/h/.cache/cob/models", "/h/.cache/cob/kv", "/h/.local/state/cob/sessions"]),
        );
        check(&[], None);
    }
}
