//! What a call touches, the rules, and the one decision.

use std::path::PathBuf;

/// One thing that a call is going to touch, declared by its tool before it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    Read(PathBuf),
    Write(PathBuf),
    /// A shell command line.
    Run(String),
    /// A host.
    Network(String),
}
