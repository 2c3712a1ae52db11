//! `Write`: a whole file.

use std::fs;
use std::path::Path;

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Seen, Stop, Tool, ToolContext, ToolOutput, blocking, files, schema, text};
use crate::message::ToolSpec;
use crate::permission::Access;

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    /// Path of the file; missing folders are created.
    file_path: String,
    /// The whole content.
    content: String,
}

pub(super) struct Write {
    spec: ToolSpec,
}

impl Write {
    pub(super) fn new() -> Self {
        let description =
            "Creates a file, or replaces all of one that was read before. To change a part of a file use Edit.";
        Write { spec: schema::spec_of::<Arguments>("Write", description) }
    }
}

#[async_trait]
impl Tool for Write {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn access(&self, arguments: &Value, context: &ToolContext) -> Result<Vec<Access>, String> {
        let arguments: Arguments = schema::arguments(arguments.clone())?;
        Ok(vec![Access::Write(files::absolute(context, &arguments.file_path)?)])
    }

    fn read_only(&self) -> bool {
        false
    }

    async fn run(&self, arguments: Value, context: &ToolContext) -> ToolOutput {
        blocking(context, |context, stop| write(schema::arguments(arguments)?, context, stop)).await
    }
}

fn write(arguments: Arguments, context: &ToolContext, stop: &Stop) -> Result<String, String> {
    let Arguments { file_path, content } = arguments;
    let path = files::resolved(context, &file_path)?;
    let name = files::shown(context, &path);
    if file_path.ends_with('/') {
        return Err(format!("{file_path} names a folder. Give the path of a file in it."));
    }
    let before = match fs::symlink_metadata(&path) {
        Err(_) => None,
        Ok(_) => Some(files::regular(context, &path)?),
    };
    if let Some(before) = &before {
        // An empty file has nothing to lose.
        if before.len() > 0 {
            let now = files::fingerprint_of_file(&path, stop)?;
            match context.files.compare(&path, &now) {
                Seen::AsItIs => {}
                Seen::Partly => {
                    return Err(format!(
                        "Only a part of {name} was read, so nothing was written: the rest would be lost. To change a part of it, use \
                         Edit; to replace all of it, call Read on it without offset and limit and then Write again."
                    ));
                }
                Seen::Never => {
                    let adding = addition(&file_path, &path, &content).unwrap_or_default();
                    return Err(format!(
                        "{name} already exists and was not read yet, so nothing was written: Write replaces the whole file.{adding} To \
                         change a part of it, use Edit; to replace all of it, call Read on it and then Write again."
                    ));
                }
                Seen::Edited => {
                    return Err(format!(
                        "{name} was changed with Edit and not read since, so nothing was written: what Edit did would be lost. To \
                         replace it all the same, call Read on it and then Write again."
                    ));
                }
                Seen::Otherwise => {
                    return Err(format!(
                        "{name} has changed since it was last read, so nothing was written. Call Read on it, then Write again."
                    ));
                }
            }
        }
    } else if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|error| files::could_not("create the folder", folder, error))?;
    }
    stop.check()?;
    files::replace(&path, content.as_bytes(), before.as_ref())?;
    context.files.note(&path, files::fingerprint(content.as_bytes()));
    let size = format!("{}, {}", text::counted(content.lines().count(), "line"), text::counted(content.len(), "byte"));
    Ok(match before {
        None => format!("Created {name}: {size}."),
        Some(before) => {
            format!("Replaced {name}: now {size} (before: {}).", text::counted(before.len() as usize, "byte"))
        }
    })
}

/// The Edit that adds `content` at the end of a text file: small models take Write for that, and would lose the rest. `None` where
/// it looks like a new version of the file, or Edit would not find the place.
fn addition(file_path: &str, path: &Path, content: &str) -> Option<String> {
    const FILE_BYTES_MAX: u64 = 1 << 20;
    /// A longer content is not said over again.
    const CONTENT_BYTES_MAX: usize = 200;
    if content.len() > CONTENT_BYTES_MAX || fs::metadata(path).ok()?.len() > FILE_BYTES_MAX {
        return None;
    }
    let text = fs::read_to_string(path).ok()?;
    let last = text::last_line(&text)?;
    let mut new = content.lines().map(str::trim).filter(|line| !line.is_empty()).peekable();
    new.peek()?;
    if new.any(|new| text.lines().any(|old| old.trim() == new)) || text.matches(last).count() > 1 {
        return None;
    }
    let new = format!("{last}\n{}", content.trim_end_matches('\n'));
    let arguments = json!({"file_path": file_path, "old_string": last, "new_string": new});
    Some(format!(" To add this at the end, call Edit with {arguments}."))
}
