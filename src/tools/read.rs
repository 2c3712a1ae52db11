//! `Read`: the lines of a text file.

use std::fs::File;
use std::io::{self, Read as _};

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{Stop, Tool, ToolContext, ToolOutput, blocking, files, schema, text};
use crate::message::ToolSpec;
use crate::permission::Access;

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    /// Path of the file.
    file_path: String,
    /// First line to show. Only give it for a file that is too long to show at once.
    offset: Option<i64>,
    /// How many lines to show. Only give it for a file that is too long to show at once.
    limit: Option<i64>,
}

pub(super) struct Read {
    spec: ToolSpec,
}

impl Read {
    pub(super) fn new() -> Self {
        let description = "Shows the lines of a text file with their numbers; the first line of the result says how many \
                           lines the file has. For folders use LS, to search use Grep.";
        Read { spec: schema::spec_of::<Arguments>("Read", description) }
    }
}

#[async_trait]
impl Tool for Read {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn access(&self, arguments: &Value, context: &ToolContext) -> Result<Vec<Access>, String> {
        let arguments: Arguments = schema::arguments(arguments.clone())?;
        Ok(vec![Access::Read(files::absolute(context, &arguments.file_path)?)])
    }

    fn read_only(&self) -> bool {
        true
    }

    async fn run(&self, arguments: Value, context: &ToolContext) -> ToolOutput {
        blocking(context, |context, stop| read(schema::arguments(arguments)?, context, stop)).await
    }
}

/// UTF-16 is decoded as a whole; past this size it is not.
const UTF16_BYTES_MAX: u64 = 16 << 20;
/// Where a NUL byte means that the file is binary.
const SNIFFED_BYTES: usize = 8 * 1024;
const LINE_BYTES_MAX: usize = 2_000;
const LINES_MAX: usize = 2_000;
/// Kept for the header and the notes.
const HEADER_BYTES: usize = 400;

/// The file is streamed: only the lines shown are held, but all of them are counted.
fn read(arguments: Arguments, context: &ToolContext, stop: &Stop) -> Result<String, String> {
    let first = match arguments.offset.unwrap_or(1) {
        0 => 1,
        offset => usize::try_from(offset).map_err(|_| "offset must be 1 or more: lines are counted from 1.")?,
    };
    let limit = match arguments.limit {
        None => LINES_MAX,
        Some(limit @ 1..) => usize::try_from(limit).unwrap_or(usize::MAX),
        // Small models fill in 0 or −1 where they mean nothing by it.
        Some(_) => LINES_MAX,
    };
    let path = files::resolved(context, &arguments.file_path)?;
    let metadata = files::regular(context, &path)?;
    let name = files::shown(context, &path);
    let fault = |error| files::could_not("read", &path, error);
    let mut file = File::open(&path).map_err(fault)?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; 64 * 1024];
    let budget = context.output_bytes_max.saturating_sub(HEADER_BYTES);
    let mut lines = Lines::new(first, limit, budget);
    let mut notes: Vec<&str> = Vec::new();
    let mut at_start = true;
    loop {
        stop.check()?;
        let count = fill(&mut file, &mut chunk).map_err(fault)?;
        let mut bytes = &chunk[..count];
        hash.update(bytes);
        if std::mem::take(&mut at_start) {
            if bytes.starts_with(&[0xFF, 0xFE]) || bytes.starts_with(&[0xFE, 0xFF]) {
                if metadata.len() > UTF16_BYTES_MAX {
                    return Err(format!(
                        "{name} is UTF-16 and too large ({} bytes) to be decoded here.",
                        metadata.len()
                    ));
                }
                let mut all = bytes.to_vec();
                file.read_to_end(&mut all).map_err(fault)?;
                hash.update(&all[bytes.len()..]);
                let decoded = decode_utf16(&all);
                lines.push(decoded.as_bytes());
                notes.push("decoded from UTF-16");
                if all.len() % 2 == 1 {
                    notes.push("the last byte is half a character: U+FFFD stands for it");
                }
                break;
            }
            if bytes[..count.min(SNIFFED_BYTES)].contains(&0) {
                return Err(format!(
                    "{name} is a binary file ({} bytes), which Read cannot show. Use Bash with a program that understands it.",
                    metadata.len()
                ));
            }
            if let Some(rest) = bytes.strip_prefix(b"\xEF\xBB\xBF") {
                bytes = rest;
                notes.push("UTF-8 with BOM");
            }
        }
        if count == 0 {
            break;
        }
        lines.push(bytes);
    }
    let lines = lines.finish();
    let fingerprint = hash.finalize().into();
    if lines.total == 0 || (first, lines.last_shown) == (1, lines.total) {
        context.files.note(&path, fingerprint);
    } else {
        context.files.note_part(&path, fingerprint);
    }

    if lines.carriage_returns > 0 {
        notes.push(if lines.carriage_returns >= lines.total { "CRLF line ends" } else { "some lines end in CRLF" });
    }
    if lines.unterminated {
        notes.push("no newline at the end of the last line");
    }
    if lines.lossy {
        notes.push("not all UTF-8: U+FFFD stands for what is not");
    }
    if lines.nul {
        notes.push("contains NUL bytes");
    }
    let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
    let total = text::counted(lines.total, "line");
    if lines.total == 0 {
        return Ok(format!("{name} has 0 lines (the file is empty)"));
    }
    if first > lines.total {
        return Err(format!("{name} has only {total}; there is nothing at offset {first}."));
    }
    let last = lines.last_shown;
    let header = if (first, last) == (1, lines.total) {
        format!("{name} has {total}{notes}")
    } else if last < first {
        return Err(format!("A result may have only {} bytes: too few to show a line.", context.output_bytes_max));
    } else if last < lines.total {
        format!(
            "{name} has {} lines; lines {first}-{last} follow, call Read with offset={} for more{notes}",
            lines.total,
            last + 1
        )
    } else {
        format!("{name} has {} lines; lines {first}-{last} follow{notes}", lines.total)
    };
    Ok(format!("{header}\n{}", lines.shown))
}

/// Reads until the chunk is full or the file ends, so that what is sniffed does not depend on the system's mood.
fn fill(file: &mut File, chunk: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < chunk.len() {
        match file.read(&mut chunk[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn decode_utf16(bytes: &[u8]) -> String {
    let little = bytes.starts_with(&[0xFF, 0xFE]);
    let unit = |pair: &[u8]| match little {
        true => u16::from_le_bytes([pair[0], pair[1]]),
        false => u16::from_be_bytes([pair[0], pair[1]]),
    };
    let pairs = bytes[2..].chunks_exact(2);
    let torn = if pairs.remainder().is_empty() { "" } else { "\u{fffd}" };
    let units: Vec<u16> = pairs.map(unit).collect();
    String::from_utf16_lossy(&units) + torn
}

/// Counts all lines and keeps those wanted. A last line without a newline counts as a line.
struct Lines {
    first: usize,
    limit: usize,
    budget: usize,
    line_bytes_max: usize,
    /// Of the line being read: its beginning, and how long it is.
    line: Vec<u8>,
    line_bytes: usize,
    total: usize,
    shown: String,
    last_shown: usize,
    full: bool,
    carriage_returns: usize,
    ends_in_carriage_return: bool,
    unterminated: bool,
    lossy: bool,
    nul: bool,
}

impl Lines {
    fn new(first: usize, limit: usize, budget: usize) -> Self {
        Lines {
            first,
            limit,
            budget,
            line_bytes_max: LINE_BYTES_MAX.min(budget / 2),
            line: Vec::new(),
            line_bytes: 0,
            total: 0,
            shown: String::new(),
            last_shown: 0,
            full: false,
            carriage_returns: 0,
            ends_in_carriage_return: false,
            unterminated: false,
            lossy: false,
            nul: false,
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        let mut pieces = bytes.split(|&byte| byte == b'\n');
        let unfinished = pieces.next_back().unwrap_or_default();
        for piece in pieces {
            self.extend(piece);
            self.end();
        }
        self.extend(unfinished);
    }

    fn wanted(&self) -> bool {
        let number = self.total + 1;
        !self.full && number >= self.first && number - self.first < self.limit
    }

    fn extend(&mut self, bytes: &[u8]) {
        let Some(&last) = bytes.last() else { return };
        self.ends_in_carriage_return = last == b'\r';
        self.line_bytes += bytes.len();
        if self.wanted() {
            // Four bytes more than are shown, so that a cut is seen and finds its character whole.
            let room = (self.line_bytes_max + 4).saturating_sub(self.line.len());
            self.line.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    fn end(&mut self) {
        let wanted = self.wanted();
        self.total += 1;
        if self.ends_in_carriage_return && self.line_bytes > 0 {
            self.carriage_returns += 1;
        }
        if wanted {
            self.show();
        }
        self.line.clear();
        self.line_bytes = 0;
        self.ends_in_carriage_return = false;
    }

    fn show(&mut self) {
        let line = match self.line_bytes == self.line.len() {
            true => self.line.strip_suffix(b"\r").unwrap_or(&self.line),
            false => &self.line,
        };
        let whole = line.len() == self.line_bytes || line.len() <= self.line_bytes_max;
        let decoded = String::from_utf8_lossy(line);
        let mut shown = text::cut(&decoded, self.line_bytes_max).to_string();
        if !whole {
            // A character cut off at the end of what was kept is no fault of the file.
            let kept = shown.trim_end_matches('\u{fffd}').len();
            shown.truncate(kept);
            shown.push_str(&format!(" [... line cut; it has {} bytes]", self.line_bytes));
        }
        let rendered = format!("{}\t{shown}\n", self.total);
        if self.shown.len() + rendered.len() > self.budget {
            self.full = true;
            return;
        }
        self.lossy |= shown.contains('\u{fffd}') && std::str::from_utf8(line).is_err();
        self.nul |= line.contains(&0);
        self.shown.push_str(&rendered);
        self.last_shown = self.total;
    }

    fn finish(mut self) -> Self {
        if self.line_bytes > 0 {
            self.unterminated = true;
            // A carriage return at the end of the file ends no line.
            self.end();
        }
        self
    }
}
