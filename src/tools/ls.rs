//! `LS`: one folder.

use std::fs;

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::{Stop, Tool, ToolContext, ToolOutput, blocking, files, schema, text};
use crate::message::ToolSpec;
use crate::permission::Access;

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    /// Path of the folder. Omit it for the current one.
    path: Option<String>,
}

impl Arguments {
    fn path(&self) -> &str {
        self.path.as_deref().filter(|path| !path.is_empty()).unwrap_or(".")
    }
}

pub(super) struct Ls {
    spec: ToolSpec,
}

impl Ls {
    pub(super) fn new() -> Self {
        let description = "Lists what is in one folder. To find files by name in all folders use Glob.";
        Ls { spec: schema::spec_of::<Arguments>("LS", description) }
    }
}

#[async_trait]
impl Tool for Ls {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn access(&self, arguments: &Value, context: &ToolContext) -> Result<Vec<Access>, String> {
        let arguments: Arguments = schema::arguments(arguments.clone())?;
        Ok(vec![Access::Read(files::absolute(context, arguments.path())?)])
    }

    fn read_only(&self) -> bool {
        true
    }

    async fn run(&self, arguments: Value, context: &ToolContext) -> ToolOutput {
        blocking(context, |context, stop| list(schema::arguments(arguments)?, context, stop)).await
    }
}

fn list(arguments: Arguments, context: &ToolContext, stop: &Stop) -> Result<String, String> {
    let path = files::resolved(context, arguments.path())?;
    let metadata = files::found(context, &path)?;
    let name = files::shown(context, &path);
    if !metadata.is_dir() {
        return Err(format!("{name} is a file, not a folder. Use Read to see what is in it."));
    }
    let fault = |error| files::could_not("list", &path, error);
    let (mut folders, mut others) = (0, 0);
    let mut entries: Vec<(std::ffi::OsString, String)> = Vec::new();
    for entry in fs::read_dir(&path).map_err(fault)? {
        stop.check()?;
        let entry = entry.map_err(fault)?;
        let file_name = entry.file_name();
        let shown = text::name(file_name.as_ref());
        let line = match entry.file_type() {
            Ok(kind) if kind.is_dir() => {
                folders += 1;
                format!("{shown}/")
            }
            Ok(kind) if kind.is_symlink() => {
                others += 1;
                let target = fs::read_link(entry.path()).map(|target| text::name(&target)).unwrap_or_default();
                format!("{shown} -> {target}")
            }
            Ok(kind) if kind.is_file() => {
                others += 1;
                let size = entry.metadata().map_or(0, |metadata| metadata.len());
                format!("{shown} ({})", text::counted(size as usize, "byte"))
            }
            _ => {
                others += 1;
                format!("{shown} (a device, pipe or socket)")
            }
        };
        entries.push((file_name, line));
    }
    entries.sort();
    let lines: Vec<String> = entries.into_iter().map(|(_, line)| line).collect();
    if lines.is_empty() {
        return Ok(format!("{name}: the folder is empty"));
    }
    // The names come first and the counts last: small models repeat the first line as their answer.
    let counts = [(folders, "folder"), (others, "file")];
    let counts = counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| text::counted(*count, what));
    let footer = format!("[{name}: {}]\n", counts.collect::<Vec<_>>().join(", "));
    let (listed, left_out) = text::joined(&lines, context.output_bytes_max.saturating_sub(footer.len() + 100));
    let note = match left_out {
        0 => String::new(),
        count => format!("[... {count} more not shown; use Glob with a pattern for a part of them]\n"),
    };
    Ok(format!("{listed}{note}{footer}"))
}
