//! `Edit`: a part of a file.

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
    /// Path of the file.
    file_path: String,
    /// The text to replace, exactly as in the file, without line numbers.
    old_string: String,
    /// What stands there afterwards.
    new_string: String,
    /// Replace every occurrence.
    replace_all: Option<bool>,
}

pub(super) struct Edit {
    spec: ToolSpec,
}

impl Edit {
    pub(super) fn new() -> Self {
        let description = "Replaces text in a file. old_string must occur exactly once unless replace_all is set. For a new \
                           file use Write.";
        Edit { spec: schema::spec_of::<Arguments>("Edit", description) }
    }
}

#[async_trait]
impl Tool for Edit {
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
        blocking(context, |context, stop| edit(schema::arguments(arguments)?, context, stop)).await
    }
}

/// Small models leave `old_string` empty when they want to add a line at the end.
fn nothing_to_replace(name: &str, bytes: &[u8]) -> String {
    match text::last_line(&String::from_utf8_lossy(bytes)) {
        Some(last) => format!(
            "old_string is empty. To add text at the end of {name}, give its last line as old_string, and as new_string that line, a \
             line break and the new text. The last line is: {last}"
        ),
        None => format!(
            "old_string is empty. Give the text of {name} that is to be replaced, or write the whole file with Write."
        ),
    }
}

/// The file is held three times.
const FILE_BYTES_MAX: u64 = 32 << 20;
const BOM: &str = "\u{feff}";

fn edit(arguments: Arguments, context: &ToolContext, stop: &Stop) -> Result<String, String> {
    let path = files::resolved(context, &arguments.file_path)?;
    let before = files::regular(context, &path)?;
    let name = files::shown(context, &path);
    if before.len() > FILE_BYTES_MAX {
        return Err(format!("{name} has {} bytes; Edit takes up to {FILE_BYTES_MAX}. Use Bash.", before.len()));
    }
    let bytes = fs::read(&path).map_err(|error| files::could_not("read", &path, error))?;
    if arguments.old_string.is_empty() {
        return Err(nothing_to_replace(&name, &bytes));
    }
    // The unique match proves that the model knows the place, so a file that was never read may be edited.
    if context.files.compare(&path, &files::fingerprint(&bytes)) == Seen::Otherwise {
        return Err(format!(
            "{name} has changed since it was last read, so nothing was written. Call Read on it, then Edit again."
        ));
    }
    let content = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!("{name} is not UTF-8 (at byte {at}), and Edit would damage it. Use Bash.")
    })?;
    let file = Lines::of(&content);
    let old = arguments.old_string.replace("\r\n", "\n");
    let new = arguments.new_string.replace("\r\n", "\n");
    if old == new {
        return Err("old_string and new_string are the same, so there is nothing to change.".into());
    }
    stop.check()?;
    let places = file.places_of(&old);
    let all = arguments.replace_all.unwrap_or(false);
    if places.is_empty() {
        return Err(not_found(&file, &old, &new, &name));
    }
    if places.len() > 1 && !all {
        let lines: Vec<String> = places.iter().take(10).map(|&at| file.line_at(at).to_string()).collect();
        let more = if places.len() > 10 { ", ..." } else { "" };
        return Err(format!(
            "old_string occurs {} times in {name} (lines {}{more}), so nothing was written. Add lines around it to old_string until it occurs once, or set replace_all.",
            places.len(),
            lines.join(", ")
        ));
    }
    let (changed, firsts) = file.replaced(&places, &old, &new);
    stop.check()?;
    files::replace(&path, changed.as_bytes(), Some(&before))?;
    context.files.note_edited(&path, files::fingerprint(changed.as_bytes()));
    Ok(report(&changed, &firsts, new.matches('\n').count() + 1, &name, context.output_bytes_max))
}

/// A file's text with `\n` alone at the line ends, which is what the model sees and writes, and the way back.
struct Lines<'a> {
    original: &'a str,
    /// Of the original, in bytes.
    bom: usize,
    text: String,
    /// Where in `text` a `\r` was taken out before the `\n`.
    removed: Vec<usize>,
    /// New lines end in CRLF where the text around them does not tell.
    crlf: bool,
}

impl<'a> Lines<'a> {
    fn of(original: &'a str) -> Self {
        let body = original.strip_prefix(BOM).unwrap_or(original);
        let bom = original.len() - body.len();
        let mut text = String::with_capacity(body.len());
        let mut removed = Vec::new();
        for piece in body.split_inclusive("\r\n") {
            match piece.strip_suffix("\r\n") {
                Some(line) => {
                    text.push_str(line);
                    removed.push(text.len());
                    text.push('\n');
                }
                None => text.push_str(piece),
            }
        }
        let crlf = removed.len() * 2 > text.matches('\n').count();
        Lines { original, bom, text, removed, crlf }
    }

    /// The position in the original of a position in `text`.
    fn back(&self, at: usize) -> usize {
        self.bom + at + self.removed.partition_point(|&removed| removed < at)
    }

    /// Where `old` begins, in `text`. Overlapping occurrences count: `aa` is twice in `aaa`.
    fn places_of(&self, old: &str) -> Vec<usize> {
        let step = old.chars().next().map_or(1, char::len_utf8);
        let mut places = Vec::new();
        let mut from = 0;
        while let Some(at) = self.text[from..].find(old) {
            places.push(from + at);
            from += at + step;
        }
        places
    }

    fn line_at(&self, at: usize) -> usize {
        line_at(&self.text, at)
    }

    /// The new content, and the positions in it where the replacements begin. What `old` and `new` share at their ends is not
    /// written again, so that its lines keep the line ends they have.
    fn replaced(&self, places: &[usize], old: &str, new: &str) -> (String, Vec<usize>) {
        let (before, after) = shared_ends(old, new);
        let middle = &new[before..new.len() - after];
        let mut changed = String::with_capacity(self.original.len() + new.len());
        let mut firsts = Vec::new();
        let mut copied = 0;
        let mut free_from = 0;
        for &at in places {
            if at < free_from {
                continue; // Overlaps the one before, which is gone.
            }
            free_from = at + old.len();
            let region = &self.original[self.back(at)..self.back(free_from)];
            let crlf = if region.contains('\n') { region.contains("\r\n") } else { self.crlf };
            let (start, end) = (self.back(at + before), self.back(free_from - after));
            changed.push_str(&self.original[copied..start]);
            firsts.push(changed.len() - (start - self.back(at)));
            match crlf {
                true => changed.push_str(&middle.replace('\n', "\r\n")),
                false => changed.push_str(middle),
            }
            copied = end;
        }
        changed.push_str(&self.original[copied..]);
        (changed, firsts)
    }
}

/// The bytes of what both begin with, and of what both end with after that.
fn shared_ends(old: &str, new: &str) -> (usize, usize) {
    let shared = |(a, b): &(char, char)| a == b;
    let before = old.chars().zip(new.chars()).take_while(shared).map(|(a, _)| a.len_utf8()).sum();
    let (old, new) = (&old[before..], &new[before..]);
    let after = old.chars().rev().zip(new.chars().rev()).take_while(shared).map(|(a, _)| a.len_utf8()).sum();
    (before, after)
}

fn line_at(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// The first change with some lines around it, so that the model sees what it did without reading again.
fn report(changed: &str, firsts: &[usize], new_lines: usize, name: &str, bytes_max: usize) -> String {
    const AROUND: usize = 3;
    const CHANGED_MAX: usize = 20;
    let first = firsts.first().map_or(1, |&at| line_at(changed, at));
    let start = first.saturating_sub(AROUND).max(1);
    let end = first + new_lines.min(CHANGED_MAX) - 1 + AROUND;
    let header = match firsts.len() {
        1 => format!("Edited {name} at line {first}. It now reads:\n"),
        count => format!("Edited {name} in {count} places, the first at line {first}. It now reads:\n"),
    };
    let lines = changed.strip_prefix(BOM).unwrap_or(changed).lines().enumerate().skip(start - 1).take(end + 1 - start);
    let lines: Vec<String> = lines.map(|(at, line)| format!("{}\t{}", at + 1, text::shortened(line, 500))).collect();
    let (shown, left_out) = text::joined(&lines, bytes_max.saturating_sub(header.len() + 60));
    let cut = match left_out {
        0 => "",
        _ => "[... more not shown]\n",
    };
    format!("{header}{shown}{cut}")
}

/// Why there is no match, as far as it can be told, and what comes near.
fn not_found(file: &Lines, old: &str, new: &str, name: &str) -> String {
    let mut text = format!("old_string was not found in {name}, so nothing was written.");
    if let Some(plain) = without_line_numbers(old) {
        text.push_str(" It begins each line with a line number, as Read shows them; leave the numbers out.");
        if file.text.contains(&plain) {
            return text;
        }
    }
    let unescaped = old.replace("\\n", "\n").replace("\\t", "\t").replace("\\\"", "\"");
    if unescaped != old && file.text.contains(&unescaped) {
        text.push_str(" It has \\n, \\t or \\\" written as two characters; write the line break, tab or quote itself.");
        return text;
    }
    if !new.trim().is_empty() && new.len() > 3 && file.text.contains(new) {
        let line = file.line_at(file.text.find(new).unwrap_or(0));
        text.push_str(&format!(" But new_string is already there, at line {line}: perhaps this edit was made before."));
    }
    if let Some((first, last, why)) = same_but_blanks(file, old) {
        text.push_str(&format!(" It differs only in {why} from:\n{}", excerpt(file, first, last)));
        text.push_str("Copy these lines exactly.");
        return text;
    }
    let near = nearest(file, old);
    if near.is_empty() {
        text.push_str(" Nothing in the file is like it. Call Read to see what is there.");
        return text;
    }
    text.push_str(" The nearest lines are:\n");
    for line in &near {
        text.push_str(&excerpt(file, *line, *line));
    }
    if near.iter().filter_map(|&line| file.text.lines().nth(line - 1)).any(decomposed) {
        text.push_str(
            "Some of their accents are separate characters (Unicode NFD); replace the file with Write instead.",
        );
    } else {
        text.push_str("Copy the text exactly as it is in the file, or call Read to see it.");
    }
    text
}

/// `old` without Read's `12<tab>` before every line, if every line has it.
fn without_line_numbers(old: &str) -> Option<String> {
    let stripped = old.lines().map(|line| {
        let (number, rest) = line.split_once('\t')?;
        let number = number.trim_start();
        (!number.is_empty() && number.chars().all(|char| char.is_ascii_digit())).then_some(rest)
    });
    Some(stripped.collect::<Option<Vec<&str>>>()?.join("\n"))
}

/// The first run of lines (from 1, both included) that equals `old` when blanks do not count, and what the difference is.
fn same_but_blanks(file: &Lines, old: &str) -> Option<(usize, usize, &'static str)> {
    fn squeeze(line: &str) -> String {
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }
    let old_lines: Vec<&str> = old.trim_matches('\n').lines().collect();
    let wanted: Vec<String> = old_lines.iter().map(|line| squeeze(line)).collect();
    if wanted.iter().all(String::is_empty) {
        return None;
    }
    let lines: Vec<&str> = file.text.lines().collect();
    let squeezed: Vec<String> = lines.iter().map(|line| squeeze(line)).collect();
    let at = squeezed.windows(wanted.len()).position(|window| window == wanted)?;
    let found = &lines[at..at + wanted.len()];
    let indent = |line: &str| line[..line.len() - line.trim_start().len()].to_string();
    let why = if found.iter().zip(&old_lines).any(|(a, b)| indent(a).contains('\t') != indent(b).contains('\t')) {
        "tabs and spaces"
    } else if found.iter().zip(&old_lines).any(|(a, b)| indent(a) != indent(b)) {
        "indentation"
    } else {
        "blanks or empty lines"
    };
    Some((at + 1, at + wanted.len(), why))
}

/// Whether accents stand as characters of their own (Unicode NFD). The tokenizer composes what the model writes, so it
/// cannot spell such a line at all.
fn decomposed(line: &str) -> bool {
    line.chars().any(|char| ('\u{300}'..='\u{36f}').contains(&char))
}

/// Up to three lines (from 1) that are most like the longest line of `old`, in the order of the file.
fn nearest(file: &Lines, old: &str) -> Vec<usize> {
    const LINES_MAX: usize = 50_000;
    const LIKENESS_MIN: f64 = 0.5;
    let Some(wanted) = old.lines().map(str::trim).max_by_key(|line| line.len()) else { return Vec::new() };
    let ascii = |line: &str| line.chars().filter(char::is_ascii).collect::<String>();
    let ascii_wanted = ascii(wanted);
    let likeness = |line: &str| match decomposed(line) {
        true => text::likeness(&ascii(line), &ascii_wanted),
        false => text::likeness(line, wanted),
    };
    let mut near: Vec<(f64, usize)> = file
        .text
        .lines()
        .take(LINES_MAX)
        .enumerate()
        .map(|(at, line)| (likeness(line.trim()), at + 1))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .collect();
    near.sort_by(|(a, a_line), (b, b_line)| b.total_cmp(a).then(a_line.cmp(b_line)));
    let mut lines: Vec<usize> = near.into_iter().take(3).map(|(_, line)| line).collect();
    lines.sort_unstable();
    lines
}

fn excerpt(file: &Lines, first: usize, last: usize) -> String {
    const LINES_MAX: usize = 20;
    let lines = file.text.lines().enumerate().skip(first - 1).take((last + 1 - first).min(LINES_MAX));
    lines.map(|(at, line)| format!("{}\t{}\n", at + 1, text::shortened(line, 300))).collect()
}
