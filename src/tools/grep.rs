//! `Grep`: content by regular expression, with ripgrep's engine.

use std::io;
use std::path::{Component, Path, PathBuf};

use async_trait::async_trait;
use grep_matcher::{LineTerminator, Matcher};
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{BinaryDetection, Searcher, SearcherBuilder, Sink, SinkFinish, SinkMatch};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::walk::{self, Pattern};
use super::{Stop, Tool, ToolContext, ToolOutput, blocking, files, schema, text};
use crate::message::ToolSpec;
use crate::permission::{self, Access};

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    /// Regular expression.
    pattern: String,
    /// File or folder to search. Omit it to search everywhere.
    path: Option<String>,
    /// Only files whose names match these wildcards. Omit it to search all.
    glob: Option<String>,
    /// What to show; content (the lines) if omitted.
    output_mode: Option<OutputMode>,
    /// Ignore case.
    #[serde(rename = "-i")]
    ignore_case: Option<bool>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum OutputMode {
    #[default]
    Content,
    FilesWithMatches,
    Count,
}

impl Arguments {
    fn path(&self) -> &str {
        self.path.as_deref().filter(|path| !path.is_empty()).unwrap_or(".")
    }
}

pub(super) struct Grep {
    spec: ToolSpec,
}

impl Grep {
    pub(super) fn new() -> Self {
        let description = "Searches the content of files for a regular expression and shows path:line:text. To find files by \
                           name use Glob.";
        Grep { spec: schema::spec_of::<Arguments>("Grep", description) }
    }
}

#[async_trait]
impl Tool for Grep {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn access(&self, arguments: &Value, context: &ToolContext) -> Result<Vec<Access>, String> {
        let arguments: Arguments = schema::arguments(arguments.clone())?;
        Ok(vec![Access::Read(Place::new(&arguments, context)?.base)])
    }

    fn read_only(&self) -> bool {
        true
    }

    async fn run(&self, arguments: Value, context: &ToolContext) -> ToolOutput {
        blocking(context, |context, stop| search(schema::arguments(arguments)?, context, stop)).await
    }
}

/// Where to search: `path` and `glob`, or a path with wildcards (`src/**/*.rs`), which is both.
struct Place {
    /// Absolute.
    base: PathBuf,
    glob: Option<String>,
    /// Where that is not what was asked for.
    note: Option<String>,
}

impl Place {
    fn new(arguments: &Arguments, context: &ToolContext) -> Result<Place, String> {
        let given = arguments.path().trim();
        let base = files::absolute(context, given)?;
        let glob = arguments.glob.as_deref().map(str::trim).filter(|glob| !glob.is_empty()).map(str::to_owned);
        let missing = base
            .symlink_metadata()
            .is_err_and(|e| matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory));
        let inside = base.starts_with(&context.cwd) && !base.components().any(|part| part == Component::ParentDir);
        if !missing || !inside {
            return Ok(Place { base, glob, note: None });
        }
        let named = text::shortened(given, 200);
        let Some(wild) = given.find(['*', '?', '[', '{']) else {
            // Small models make up folders; what they look for is somewhere all the same.
            let note = Some(format!("{named} does not exist; searched the whole workspace."));
            return Ok(Place { base: context.cwd.clone(), glob, note });
        };
        let slash = given[..wild].rfind('/');
        let base = files::absolute(context, slash.map_or(".", |slash| &given[..=slash]))?;
        let own = given[slash.map_or(0, |slash| slash + 1)..].to_owned();
        let note = glob.as_ref().map(|glob| format!("{named} has wildcards; searched its folder for files {glob}."));
        Ok(Place { base, glob: glob.or(Some(own)), note })
    }
}

/// A file with a longer line counts as unreadable: the engine holds whole lines.
const LINE_BYTES_MAX: usize = 64 << 20;
/// Of one line.
const SHOWN_BYTES_MAX: usize = 300;

fn search(arguments: Arguments, context: &ToolContext, stop: &Stop) -> Result<ToolOutput, String> {
    let matcher = matcher(&arguments)?;
    let place = Place::new(&arguments, context)?;
    let base = permission::resolve(&place.base).map_err(|error| files::could_not("look at", &place.base, error))?;
    let metadata = files::found(context, &base)?;
    let only = place.glob.as_deref().map(|glob| Pattern::new(context, &base, glob)).transpose()?;
    if let Some(only) = &only
        && only.base != base
    {
        return Err("glob must not leave the folder. Give the folder as path.".into());
    }
    let mode = arguments.output_mode.unwrap_or_default();
    let mut searcher = SearcherBuilder::new()
        .line_number(true)
        .line_terminator(LineTerminator::crlf())
        .binary_detection(BinaryDetection::quit(0))
        .heap_limit(Some(LINE_BYTES_MAX))
        .build();
    let mut tally = Tally { room: context.output_bytes_max.saturating_sub(300), ..Tally::default() };
    let mut file = |path: &Path, tally: &mut Tally| {
        let name = files::shown(context, path);
        let room = tally.room.saturating_sub(tally.shown.len());
        let lines = Vec::new();
        let mut hits =
            Hits { stop, matcher: &matcher, name: &name, mode, room, count: 0, lines, bytes: 0, binary: false };
        match searcher.search_path(&matcher, path, &mut hits) {
            Ok(()) if hits.binary => tally.binary += 1,
            Ok(()) => tally.add(&name, mode, hits),
            Err(_) if stop.check().is_err() => {}
            Err(_) => tally.unreadable += 1,
        }
    };
    if metadata.is_dir() {
        for entry in walk::entries(&base) {
            stop.check()?;
            let Ok(entry) = entry else {
                tally.unreadable += 1;
                continue;
            };
            let kind = |is: fn(&std::fs::FileType) -> bool| entry.file_type().is_some_and(|kind| is(&kind));
            if kind(std::fs::FileType::is_dir) || only.as_ref().is_some_and(|only| !only.matches(entry.path())) {
                continue;
            }
            match kind(std::fs::FileType::is_file) {
                true => file(entry.path(), &mut tally),
                false => tally.not_files += 1,
            }
        }
    } else {
        files::regular(context, &base)?;
        file(&base, &mut tally);
        tally.one_file = true;
    }
    stop.check()?;
    let mut output = tally.report(mode, &arguments, place.glob.as_deref(), &files::shown(context, &base));
    if output.led_nowhere && names_a_file(&arguments.pattern, context) {
        output
            .text
            .push_str(&format!("{} is the name of a file; to see what is in it, use Read.\n", arguments.pattern));
    }
    if let Some(note) = &place.note {
        output.text.insert_str(0, &format!("{note}\n"));
    }
    Ok(output)
}

/// Of the workspace: what lies outside is none of the model's business.
fn names_a_file(pattern: &str, context: &ToolContext) -> bool {
    let Ok(root) = permission::resolve(&context.cwd) else { return false };
    permission::resolve(&root.join(pattern.trim())).is_ok_and(|path| path.starts_with(&root) && path.is_file())
}

fn matcher(arguments: &Arguments) -> Result<RegexMatcher, String> {
    if arguments.pattern.is_empty() {
        return Err("The pattern is empty. Give the text or regular expression to search for.".into());
    }
    RegexMatcherBuilder::new()
        .case_insensitive(arguments.ignore_case.unwrap_or(false))
        .crlf(true)
        .build(&arguments.pattern)
        .map_err(|error| {
            if arguments.pattern.contains(['\n', '\r']) || arguments.pattern.contains("\\n") {
                return "The pattern contains a line break; Grep searches line by line. Search for one of the lines."
                    .into();
            }
            let escaped: String = arguments
                .pattern
                .chars()
                .flat_map(|char| r"\.+*?()|[]{}^$".contains(char).then_some('\\').into_iter().chain([char]))
                .collect();
            // The library draws the place of the fault on lines of its own; its last line says what it is.
            let error = error.to_string();
            let why = error.lines().last().unwrap_or_default().trim().trim_start_matches("error: ");
            format!(
                "The pattern is not a valid regular expression: {}. To search for it as plain text, write {escaped}",
                text::shortened(why, 300)
            )
        })
}

/// The matches of one file.
struct Hits<'a> {
    stop: &'a Stop,
    matcher: &'a RegexMatcher,
    name: &'a str,
    mode: OutputMode,
    room: usize,
    count: usize,
    lines: Vec<String>,
    bytes: usize,
    binary: bool,
}

/// What all files gave.
#[derive(Default)]
struct Tally {
    room: usize,
    files: usize,
    count: usize,
    shown: String,
    not_shown: usize,
    binary: usize,
    unreadable: usize,
    not_files: usize,
    /// A file was searched, and no folder.
    one_file: bool,
}

impl Sink for Hits<'_> {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, found: &SinkMatch<'_>) -> io::Result<bool> {
        if self.count.is_multiple_of(1024) && self.stop.check().is_err() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.count += 1;
        match self.mode {
            OutputMode::FilesWithMatches => return Ok(false),
            OutputMode::Count => return Ok(true),
            OutputMode::Content => {}
        }
        if self.bytes < self.room {
            let line = found.bytes();
            let line = line.strip_suffix(b"\n").unwrap_or(line);
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let shown = self.around_match(line);
            let line = format!("{}:{}:{shown}", self.name, found.line_number().unwrap_or_default());
            self.bytes += line.len() + 1;
            self.lines.push(line);
        }
        Ok(true)
    }

    fn finish(&mut self, _: &Searcher, finish: &SinkFinish) -> io::Result<()> {
        self.binary = finish.binary_byte_offset().is_some();
        Ok(())
    }
}

impl Hits<'_> {
    /// The line, or of a long one the part around its first match.
    fn around_match(&self, line: &[u8]) -> String {
        if line.len() <= SHOWN_BYTES_MAX {
            return String::from_utf8_lossy(line).into_owned();
        }
        let at = self.matcher.find(line).ok().flatten().map_or(0, |found| found.start());
        let boundary = |mut at: usize| {
            while at < line.len() && (0x80..0xC0).contains(&line[at]) {
                at += 1;
            }
            at
        };
        let start = boundary(at.saturating_sub(SHOWN_BYTES_MAX / 3));
        let end = boundary((start + SHOWN_BYTES_MAX).min(line.len()));
        let shown = String::from_utf8_lossy(&line[start..end]);
        let before = if start > 0 { "[...] " } else { "" };
        format!("{before}{shown} [... line cut; it has {} bytes]", line.len())
    }
}

impl Tally {
    fn add(&mut self, name: &str, mode: OutputMode, hits: Hits<'_>) {
        if hits.count == 0 {
            return;
        }
        self.files += 1;
        self.count += hits.count;
        let lines = match mode {
            OutputMode::Content => hits.lines,
            OutputMode::FilesWithMatches => vec![name.to_string()],
            OutputMode::Count => vec![format!("{name}:{}", hits.count)],
        };
        let (text, left_out) = match self.not_shown {
            0 => text::joined(&lines, self.room.saturating_sub(self.shown.len())),
            _ => (String::new(), lines.len()),
        };
        self.shown.push_str(&text);
        self.not_shown += match mode {
            // Past the bound, matches are counted and not kept.
            OutputMode::Content => left_out + (hits.count - lines.len()),
            _ => left_out,
        };
    }

    fn report(&self, mode: OutputMode, arguments: &Arguments, glob: Option<&str>, place: &str) -> ToolOutput {
        let mut skipped = Vec::new();
        if self.binary > 0 {
            skipped.push(format!("{} binary", self.binary));
        }
        if self.not_files > 0 {
            skipped.push(format!("{} not regular (links are not followed)", self.not_files));
        }
        if self.unreadable > 0 {
            skipped.push(format!("{} unreadable", self.unreadable));
        }
        let skipped = match skipped.is_empty() {
            true => String::new(),
            false => format!("[files skipped: {}]\n", skipped.join(", ")),
        };
        if self.count == 0 {
            let only = glob.map(|glob| format!(" in files {glob}")).unwrap_or_default();
            let case = match arguments.ignore_case.unwrap_or(false) {
                true => "",
                false => " Case was respected.",
            };
            let pattern = text::shortened(&arguments.pattern, 200);
            let hint = match (place, only.as_str()) {
                (".", "") => String::new(),
                _ if self.one_file => format!(" To see {place}, use Read."),
                _ => " Without path and glob the whole workspace is searched.".to_owned(),
            };
            return ToolOutput::nothing(format!("No match for {pattern} in {place}{only}.{case}{hint}\n{skipped}"));
        }
        let files = text::counted(self.files, "file");
        let header = match mode {
            OutputMode::FilesWithMatches => files,
            OutputMode::Content | OutputMode::Count => {
                format!("{} in {files}", text::counted(self.count, "matching line"))
            }
        };
        let cut = match self.not_shown {
            0 => String::new(),
            count => format!("[... {count} more not shown; narrow the pattern, or give a path or glob]\n"),
        };
        ToolOutput::ok(format!("{header}:\n{}{cut}{skipped}", self.shown))
    }
}
