//! The files below a folder, as `Glob`, `Grep` and error messages see them.

use std::path::{Component, Path, PathBuf};

use globset::{GlobBuilder, GlobMatcher};
use ignore::{DirEntry, WalkBuilder};

use super::{ToolContext, files};

/// Everything below `base` but `.git` and what ignore files of the tree name, in the order of the names. Links are not
/// followed, so nothing outside `base` is met. The user's own global ignore file has no say: the same tree gives
/// the same answer on every machine.
pub(super) fn entries(base: &Path) -> impl Iterator<Item = Result<DirEntry, ignore::Error>> {
    walk(base, true)
}

/// As [`entries`], without the ignore files.
pub(super) fn entries_ignored_too(base: &Path) -> impl Iterator<Item = Result<DirEntry, ignore::Error>> {
    walk(base, false)
}

fn walk(base: &Path, ignore_files: bool) -> ignore::Walk {
    WalkBuilder::new(base)
        .standard_filters(ignore_files)
        .hidden(false)
        .git_global(false)
        .require_git(false)
        .sort_by_file_name(Ord::cmp)
        .filter_entry(|entry| entry.file_name() != ".git")
        .build()
}

/// A glob and the folder that its paths are relative to.
#[derive(Debug)]
pub(super) struct Pattern {
    pub(super) base: PathBuf,
    matcher: GlobMatcher,
}

impl Pattern {
    /// `pattern` is relative to `folder` (absolute); without a slash it matches at any depth, as in ripgrep. Leading parts that
    /// are absolute, `~` or `..` move the base.
    pub(super) fn new(context: &ToolContext, folder: &Path, pattern: &str) -> Result<Self, String> {
        if pattern.trim().is_empty() {
            return Err("The pattern is empty. Give one like **/*.rs.".into());
        }
        let mut base = folder.to_path_buf();
        let mut glob = pattern.strip_prefix("./").unwrap_or(pattern).to_string();
        let leaves = glob.starts_with('/')
            || glob.starts_with("~/")
            || Path::new(&glob).components().any(|c| c == Component::ParentDir);
        if leaves {
            let parts: Vec<&str> = glob.split('/').collect();
            let plain = parts.iter().take_while(|part| !part.contains(['*', '?', '[', '{', '\\'])).count();
            let plain = plain.min(parts.len() - 1);
            let (literal, rest) = (parts[..plain].join("/"), parts[plain..].join("/"));
            if rest.split('/').any(|part| part == "..") {
                return Err(format!(
                    "The pattern {pattern:?} has `..` after a wildcard. Give the folder as path instead."
                ));
            }
            base = match literal.as_str() {
                "" => PathBuf::from("/"),
                "~" => files::absolute(context, "~")?,
                literal if literal.starts_with("~/") => files::absolute(context, literal)?,
                literal => folder.join(literal),
            };
            glob = rest;
        } else if !glob.contains('/') {
            glob = format!("**/{glob}");
        }
        let matcher = GlobBuilder::new(&glob)
            .literal_separator(true)
            .backslash_escape(true)
            .build()
            .map_err(|error| {
                format!("The pattern {pattern:?} is not valid: {}. Use *, ** and ? as in src/**/*.rs.", error.kind())
            })?
            .compile_matcher();
        Ok(Pattern { base, matcher })
    }

    /// `path`: below the base.
    pub(super) fn matches(&self, path: &Path) -> bool {
        path.strip_prefix(&self.base).is_ok_and(|below| self.matcher.is_match(below))
    }
}
