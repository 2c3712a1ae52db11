//! `Write`: a whole file.

use std::fs;

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

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
                    return Err(format!(
                        "{name} already exists and was not read yet, so nothing was written. To replace it, call Read on it and then Write again; to change a part of it, use Edit."
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
