//! The real model files, when they are on this machine.

use std::io::Write as _;
use std::path::PathBuf;

/// The file of the model `id` in cob's model folder. None, with the reason printed on standard error, when it is not there; a panic
/// instead under `COB_REQUIRE_MODEL=1`.
pub fn model_file(id: &str) -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let folder = var("COB_HOME")
        .map(|home| home.join("models"))
        .or_else(|| var("XDG_CACHE_HOME").map(|cache| cache.join("cob/models")))
        .or_else(|| var("HOME").map(|home| home.join(".cache/cob/models")))
        .unwrap_or_else(|| PathBuf::from("models"));
    let file = folder.join(format!("{id}.gguf"));
    if file.is_file() {
        return Some(file);
    }
    let reason = format!("{} is not there; `cob model pull {id}` fetches it", file.display());
    if std::env::var("COB_REQUIRE_MODEL").is_ok_and(|v| v == "1") {
        panic!("COB_REQUIRE_MODEL=1, but {reason}");
    }
    // Past the capture of the test harness: a test that passes without having run must not be silent.
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
    None
}
