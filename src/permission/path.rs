//! Where a path really leads.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};

/// The path with every symbolic link followed and every `.` and `..` gone, as the system would walk it. What does not
/// exist (a file to be created, its folders) is kept as it is written. `path` must be absolute.
///
/// `Err`: too many links (a loop), or a part that may not be looked at.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    const LINKS_MAX: usize = 40;
    enum Step {
        Root(PathBuf),
        Up,
        Into(OsString),
    }
    fn steps(path: &Path) -> impl DoubleEndedIterator<Item = Step> {
        path.components().filter_map(|component| match component {
            Component::Prefix(_) | Component::RootDir => Some(Step::Root(component.as_os_str().into())),
            Component::CurDir => None,
            Component::ParentDir => Some(Step::Up),
            Component::Normal(name) => Some(Step::Into(name.into())),
        })
    }
    if !path.is_absolute() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not absolute", path.display())));
    }
    let mut todo: VecDeque<Step> = steps(path).collect();
    let mut done = PathBuf::new();
    let mut links = 0;
    while let Some(step) = todo.pop_front() {
        match step {
            Step::Root(root) => done.push(root),
            Step::Up => {
                done.pop();
            }
            Step::Into(name) => {
                let next = done.join(name);
                let target = match next.symlink_metadata() {
                    Ok(found) if found.is_symlink() => Some(next.read_link()?),
                    Ok(_) => None,
                    // `NotADirectory`: a file where a folder should be; whoever opens the path is told so.
                    Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                        None
                    }
                    Err(error) => return Err(error),
                };
                let Some(target) = target else {
                    done = next;
                    continue;
                };
                links += 1;
                if links > LINKS_MAX {
                    let why = format!("{} leads through more than {LINKS_MAX} symbolic links", path.display());
                    return Err(io::Error::other(why));
                }
                // An absolute target starts over: pushing its root replaces `done`.
                steps(&target).rev().for_each(|step| todo.push_front(step));
            }
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_and_dots_are_followed_as_the_system_does() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("work/src")).unwrap();
        std::fs::create_dir_all(root.join("out/deep")).unwrap();
        std::fs::write(root.join("work/file"), "x").unwrap();
        for (target, link) in [
            ("../out", "work/relative"),
            ("../out/deep", "work/deep"),
            ("../out/new.txt", "work/dangling"),
            ("loop", "work/loop"),
            ("relative", "work/twice"),
            (".", "work/here"),
        ] {
            symlink(target, root.join(link)).unwrap();
        }
        symlink(root.join("out"), root.join("work/absolute")).unwrap();
        for (path, expected) in [
            ("work/file", "work/file"),
            ("work/./src/../file", "work/file"),
            ("work/new/deeper.txt", "work/new/deeper.txt"),
            ("work/relative/a", "out/a"),
            ("work/absolute/a", "out/a"),
            ("work/twice/a", "out/a"),
            // `..` after a link goes up from where the link leads.
            ("work/deep/../a", "out/a"),
            ("work/dangling", "out/new.txt"),
            ("work/here/here/file", "work/file"),
            ("work/none/../../out/a", "out/a"),
            ("work/file/x", "work/file/x"),
        ] {
            assert_eq!(resolve(&root.join(path)).unwrap(), root.join(expected), "{path}");
        }
        assert!(resolve(&root.join("work/loop/x")).unwrap_err().to_string().contains("symbolic links"));
        assert!(resolve(Path::new("relative")).is_err());
        assert_eq!(resolve(Path::new("/../../etc")).unwrap(), Path::new("/etc"));
    }
}
