//! `cob cache`: list, verify, clear: the prefixes that are kept on disk.

use std::fmt::Write;
use std::path::Path;

use clap::{Args, Subcommand};
use serde_json::json;

use super::setup::Fault;
use super::{pretty, print, show};
use crate::engine::store;
use crate::hub::{Folders, human_bytes};

#[derive(Args)]
pub struct CacheArgs {
    #[command(subcommand)]
    command: CacheCommand,
    /// JSON on standard output
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum CacheCommand {
    /// The prefixes, the most recently used first
    List,
    /// Check every byte of them; exit code 1 if one is damaged
    Verify,
    /// Delete all of them
    Clear,
}

pub fn run(args: CacheArgs) -> u8 {
    execute(&args).unwrap_or_else(|fault| show(Err(fault)))
}

fn execute(args: &CacheArgs) -> Result<u8, Fault> {
    let dir = Folders::from_env()?.kv;
    let fault = |error: std::io::Error| Fault::failed(format!("cannot read {}: {error}", dir.display()));
    let (text, code) = match args.command {
        CacheCommand::List => (list(&dir, args.json).map_err(fault)?, 0),
        CacheCommand::Verify => verify(&dir, args.json).map_err(fault)?,
        CacheCommand::Clear => {
            let (count, bytes) = store::clear(&dir)
                .map_err(|error| Fault::failed(format!("cannot clear {}: {error}", dir.display())))?;
            let text = if args.json {
                pretty(&json!({"removed": count, "bytes": bytes}))
            } else {
                format!("removed {count} of the kept prefixes ({})\n", human_bytes(bytes))
            };
            (text, 0)
        }
    };
    print(&text);
    Ok(code)
}

fn list(dir: &Path, as_json: bool) -> std::io::Result<String> {
    let (entries, bad) = store::list(dir)?;
    if as_json {
        let bad: Vec<_> = bad.iter().map(|(path, why)| json!({"path": path, "problem": why})).collect();
        return Ok(pretty(&json!({"folder": dir, "prefixes": entries, "unusable": bad})));
    }
    let mut text = String::new();
    for entry in &entries {
        let name = entry.path.file_name().unwrap_or_default().to_string_lossy();
        let unused = age(entry.unused_s);
        let _ =
            writeln!(text, "{name}  {:>6} tokens  {:>9}  used {unused} ago", entry.tokens, human_bytes(entry.bytes));
    }
    for (path, why) in &bad {
        let _ = writeln!(text, "{}: cannot be used: {why}", path.display());
    }
    let bytes = entries.iter().map(|entry| entry.bytes).sum();
    let _ = writeln!(text, "{} kept prefixes, {}, in {}", entries.len(), human_bytes(bytes), dir.display());
    Ok(text)
}

fn age(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

fn verify(dir: &Path, as_json: bool) -> std::io::Result<(String, u8)> {
    let (entries, bad) = store::list(dir)?;
    let checked = entries.into_iter().map(|entry| (store::verify(&entry.path).err(), entry.path));
    let checked: Vec<_> = checked.chain(bad.into_iter().map(|(path, why)| (Some(why), path))).collect();
    let code = u8::from(checked.iter().any(|(problem, _)| problem.is_some()));
    let text = if as_json {
        let all: Vec<_> = checked
            .iter()
            .map(|(problem, path)| json!({"path": path, "ok": problem.is_none(), "problem": problem}))
            .collect();
        pretty(&json!(all))
    } else if checked.is_empty() {
        format!("no prefix is kept in {}\n", dir.display())
    } else {
        let verdict = |problem: &Option<String>| match problem {
            None => "ok".to_owned(),
            Some(why) => format!("WRONG: {why}; it is not used, and `cob cache clear` removes it"),
        };
        checked.iter().map(|(problem, path)| format!("{}: {}\n", path.display(), verdict(problem))).collect()
    };
    Ok((text, code))
}
