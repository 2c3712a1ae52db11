//! Bounds and likeness of text.

use std::collections::HashMap;

/// The largest end of a whole character at or before `bytes`.
pub(super) fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// At most `bytes` of it and three dots.
pub(super) fn shortened(text: &str, bytes: usize) -> String {
    if text.len() <= bytes { text.to_string() } else { format!("{}...", cut(text, bytes)) }
}

/// The last resort for a result that its tool did not keep within the bound.
pub(super) fn bounded(text: String, bytes_max: usize) -> String {
    if text.len() <= bytes_max {
        return text;
    }
    let note = |cut: usize| format!("\n[... {cut} bytes cut ...]");
    let kept = cut(&text, bytes_max.saturating_sub(note(text.len()).len()));
    format!("{kept}{}", note(text.len() - kept.len()))
}

/// The last line that has something on it, if it is short enough to be shown to the model.
pub(super) fn last_line(text: &str) -> Option<&str> {
    const BYTES_MAX: usize = 200;
    text.lines().rev().find(|line| !line.trim().is_empty()).filter(|line| line.len() <= BYTES_MAX)
}

/// `1 line`, `2 lines`.
pub(super) fn counted(count: usize, one: &str) -> String {
    match (count, one.strip_suffix("ch")) {
        (1, _) => format!("1 {one}"),
        (_, Some(_)) => format!("{count} {one}es"),
        (_, None) => format!("{count} {one}s"),
    }
}

/// Lines joined by newlines as far as `bytes_max` allows, and how many were left out. Room for a closing note must
/// already be off `bytes_max`.
pub(super) fn joined(lines: &[String], bytes_max: usize) -> (String, usize) {
    let mut text = String::new();
    for (at, line) in lines.iter().enumerate() {
        if text.len() + line.len() + 1 > bytes_max {
            return (text, lines.len() - at);
        }
        text.push_str(line);
        text.push('\n');
    }
    (text, 0)
}

/// From 0 (nothing in common) to 1 (the same letters in the same order): the share of common letter pairs, case apart.
pub(super) fn likeness(a: &str, b: &str) -> f64 {
    const CHARS_MAX: usize = 400;
    fn pairs(text: &str) -> Vec<(char, char)> {
        let chars: Vec<char> = text.chars().flat_map(char::to_lowercase).take(CHARS_MAX).collect();
        chars.windows(2).map(|pair| (pair[0], pair[1])).collect()
    }
    let (a, b) = (pairs(a), pairs(b));
    if a.is_empty() || b.is_empty() {
        return 0.0;
    }
    let mut left: HashMap<(char, char), usize> = HashMap::new();
    a.iter().for_each(|pair| *left.entry(*pair).or_default() += 1);
    let common = b
        .iter()
        .filter(|pair| {
            left.get_mut(pair).is_some_and(|n| {
                *n > 0 && {
                    *n -= 1;
                    true
                }
            })
        })
        .count();
    2.0 * common as f64 / (a.len() + b.len()) as f64
}

/// A file's name on one line, whatever is in it.
pub(super) fn name(path: &std::path::Path) -> String {
    let text = path.to_string_lossy();
    if text.chars().any(char::is_control) { format!("{text:?}") } else { text.into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_cut_inside_a_character() {
        assert_eq!(cut("aộb", 1), "a");
        assert_eq!(cut("aộb", 3), "a");
        assert_eq!(cut("aộb", 4), "aộ");
        assert_eq!(shortened("ộộ", 4), "ộ...");
        let text = bounded("ộ".repeat(100), 60);
        assert!(text.len() <= 60 && text.starts_with("ộ") && text.ends_with(" bytes cut ...]"), "{text}");
        assert_eq!(bounded("ộ".into(), 3), "ộ");
    }

    #[test]
    fn likeness_orders() {
        assert_eq!(likeness("same", "SAME"), 1.0);
        assert!(likeness("config.rs", "confg.rs") > 0.7);
        assert!(likeness("config.rs", "main.py") < 0.2);
        assert_eq!(likeness("", ""), 0.0);
    }
}
