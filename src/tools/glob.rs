//! `Glob`: files by name.

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::walk::{self, Pattern};
use super::{Stop, Tool, ToolContext, ToolOutput, blocking, files, schema, text};
use crate::message::ToolSpec;
use crate::permission::{self, Access};

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    /// Names with wildcards, for example *.py
    pattern: String,
    /// Folder to look in. Omit it to look everywhere.
    path: Option<String>,
}

impl Arguments {
    fn pattern(&self, context: &ToolContext) -> Result<Pattern, String> {
        let folder = self.path.as_deref().filter(|path| !path.is_empty()).unwrap_or(".");
        Pattern::new(context, &files::absolute(context, folder)?, &self.pattern)
    }
}

pub(super) struct Glob {
    spec: ToolSpec,
}

impl Glob {
    pub(super) fn new() -> Self {
        let description = "Finds files by their names, in all folders. To search in their content use Grep.";
        Glob { spec: schema::spec_of::<Arguments>("Glob", description) }
    }
}

#[async_trait]
impl Tool for Glob {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn access(&self, arguments: &Value, context: &ToolContext) -> Result<Vec<Access>, String> {
        let arguments: Arguments = schema::arguments(arguments.clone())?;
        Ok(vec![Access::Read(arguments.pattern(context)?.base)])
    }

    fn read_only(&self) -> bool {
        true
    }

    async fn run(&self, arguments: Value, context: &ToolContext) -> ToolOutput {
        blocking(context, |context, stop| find(schema::arguments(arguments)?, context, stop)).await
    }
}

fn find(arguments: Arguments, context: &ToolContext, stop: &Stop) -> Result<ToolOutput, String> {
    let mut pattern = arguments.pattern(context)?;
    pattern.base =
        permission::resolve(&pattern.base).map_err(|error| files::could_not("look at", &pattern.base, error))?;
    if !files::found(context, &pattern.base)?.is_dir() {
        return Err(format!("{} is a file, not a folder. Use Read to see it.", files::shown(context, &pattern.base)));
    }
    let mut found = Vec::new();
    let mut unreadable = 0;
    for entry in walk::entries(&pattern.base) {
        stop.check()?;
        match entry {
            Ok(entry) if is_file(&entry) && pattern.matches(entry.path()) => {
                found.push(files::shown(context, entry.path()));
            }
            Ok(_) => {}
            Err(_) => unreadable += 1,
        }
    }
    found.sort();
    let mut notes = String::new();
    if unreadable > 0 {
        let places = text::counted(unreadable, "folder or file");
        notes.push_str(&format!("[{places} could not be read]\n").replace("folder or files", "folders or files"));
    }
    if found.is_empty() {
        let ignored = ignored_matches(&pattern, stop)?;
        let ignored = match ignored {
            0 => String::new(),
            count => format!(" {} that ignore files such as .gitignore exclude.", text::counted(count, "match")),
        };
        let place = files::shown(context, &pattern.base);
        return Ok(ToolOutput::nothing(format!("No file in {place} matches {}.{ignored}\n{notes}", arguments.pattern)));
    }
    let header = format!("{}:\n", text::counted(found.len(), "file"));
    let room = context.output_bytes_max.saturating_sub(header.len() + notes.len() + 100);
    let (listed, left_out) = text::joined(&found, room);
    if left_out > 0 {
        notes.push_str(&format!("[... {left_out} more not shown; give a narrower pattern or a path]\n"));
    }
    Ok(ToolOutput::ok(format!("{header}{listed}{notes}")))
}

/// No folder, and no link to one.
fn is_file(entry: &ignore::DirEntry) -> bool {
    entry.file_type().is_some_and(|kind| !(kind.is_dir() || kind.is_symlink() && entry.path().is_dir()))
}

/// How many files would match were it not for ignore files, so that "none" does not mislead.
fn ignored_matches(pattern: &Pattern, stop: &Stop) -> Result<usize, String> {
    let mut count = 0;
    for entry in walk::entries_ignored_too(&pattern.base).flatten() {
        stop.check()?;
        count += usize::from(is_file(&entry) && pattern.matches(entry.path()));
    }
    Ok(count)
}
