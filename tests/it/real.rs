//! Where the real model is, for tests that want it.

use std::path::PathBuf;

/// The file of an installed model. Without it: `None` and a printed reason, or a failure under `COB_REQUIRE_MODEL=1`.
pub fn model_file(id: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("COB_HOME")
        .map(|home| PathBuf::from(home).join("models"))
        .or_else(|| std::env::var_os("XDG_CACHE_HOME").map(|dir| PathBuf::from(dir).join("cob/models")))
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/cob/models")))?;
    let path = cache.join(format!("{id}.gguf"));
    if path.exists() {
        return Some(path);
    }
    let why = format!("{} is not there; `cob model pull {id}` installs it", path.display());
    assert!(std::env::var_os("COB_REQUIRE_MODEL").is_none_or(|v| v != "1"), "COB_REQUIRE_MODEL=1, but {why}");
    eprintln!("SKIPPED: {why}");
    None
}

pub const CODER_05B: &str = "qwen2.5-coder-0.5b-instruct-q4_k_m";
pub const CODER_15B: &str = "qwen2.5-coder-1.5b-instruct-q4_k_m";
