//! Output with a bound: the first half and the last half stay.

use std::collections::VecDeque;

/// What a child wrote to one stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// With a line that says so where the middle was cut, and `U+FFFD` where it was not UTF-8.
    pub text: String,
    pub bytes_total: u64,
    pub bytes_cut: u64,
    /// Where in `text` that line stands.
    pub gap: Option<std::ops::Range<usize>>,
    /// Some of the bytes kept were not UTF-8.
    pub lossy: bool,
}

/// Collects bytes; holds at most `bytes_max` of them.
pub(super) struct Capture {
    head: Vec<u8>,
    head_max: usize,
    tail: VecDeque<u8>,
    tail_max: usize,
    total: u64,
}

impl Capture {
    pub(super) fn new(bytes_max: usize) -> Self {
        let head_max = bytes_max / 2;
        Capture { head: Vec::new(), head_max, tail: VecDeque::new(), tail_max: bytes_max - head_max, total: 0 }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let (head, rest) = bytes.split_at(bytes.len().min(self.head_max - self.head.len()));
        self.head.extend_from_slice(head);
        let rest = &rest[rest.len().saturating_sub(self.tail_max)..];
        let surplus = (self.tail.len() + rest.len()).saturating_sub(self.tail_max);
        self.tail.drain(..surplus);
        self.tail.extend(rest);
    }

    /// The bytes as they are; when some were cut, head and tail just follow each other.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        let mut bytes = self.head;
        bytes.extend(self.tail);
        bytes
    }

    pub(super) fn finish(self) -> Captured {
        let bytes_total = self.total;
        let kept = (self.head.len() + self.tail.len()) as u64;
        if kept == bytes_total {
            let (text, lossy) = lossy(&self.into_bytes());
            return Captured { text, bytes_total, bytes_cut: 0, gap: None, lossy };
        }
        let tail: Vec<u8> = self.tail.into();
        let head = &self.head[..head_end(&self.head)];
        let tail = &tail[tail_start(&tail)..];
        let bytes_cut = bytes_total - (head.len() + tail.len()) as u64;
        let (head, head_lossy) = lossy(head);
        let (tail, tail_lossy) = lossy(tail);
        let end = if head.is_empty() || head.ends_with('\n') { "" } else { "\n" };
        let line = format!("{end}[... {bytes_cut} of {bytes_total} bytes of output cut here ...]\n");
        let gap = Some(head.len()..head.len() + line.len());
        let text = format!("{head}{line}{tail}");
        Captured { text, bytes_total, bytes_cut, gap, lossy: head_lossy || tail_lossy }
    }
}

fn lossy(bytes: &[u8]) -> (String, bool) {
    match String::from_utf8_lossy(bytes) {
        std::borrow::Cow::Borrowed(text) => (text.to_string(), false),
        std::borrow::Cow::Owned(text) => (text, true),
    }
}

/// Where the head ends: after a whole line if one ends in its second half, else after a whole character.
fn head_end(head: &[u8]) -> usize {
    if let Some(at) = head.iter().rposition(|&byte| byte == b'\n').filter(|&at| at >= head.len() / 2) {
        return at + 1;
    }
    // A character has at most four bytes: look back for a first byte whose character is not complete.
    for back in 1..=head.len().min(4) {
        let at = head.len() - back;
        let needed = match head[at] {
            0xC2..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF4 => 4,
            0x80..=0xBF => continue,
            _ => 1,
        };
        return if needed > back { at } else { head.len() };
    }
    head.len()
}

/// Where the tail starts: at a whole line if one starts in its first half, else at a whole character.
fn tail_start(tail: &[u8]) -> usize {
    if let Some(at) = tail.iter().position(|&byte| byte == b'\n').filter(|&at| at < tail.len() / 2) {
        return at + 1;
    }
    tail.iter().take(3).take_while(|&&byte| (0x80..=0xBF).contains(&byte)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_cut_between_characters_and_said() {
        #[track_caller]
        fn check(bytes_max: usize, chunks: &[&[u8]], text: &str, cut: u64, lossy: bool) {
            let mut capture = Capture::new(bytes_max);
            let total: usize = chunks.iter().map(|chunk| chunk.len()).sum();
            chunks.iter().for_each(|chunk| capture.push(chunk));
            let line = format!("[... {cut} of {total} bytes of output cut here ...]\n");
            let text = text.replace("[…]\n", &line);
            let captured = capture.finish();
            assert_eq!((captured.text, captured.bytes_total), (text.clone(), total as u64));
            assert_eq!((captured.bytes_cut, captured.lossy), (cut, lossy));
            match captured.gap {
                None => assert_eq!(cut, 0),
                Some(gap) => assert_eq!(text[gap].trim_start(), line),
            }
        }
        check(8, &[], "", 0, false);
        check(8, &[b"12345678"], "12345678", 0, false);
        check(8, &[b"123", b"45678"], "12345678", 0, false);
        check(8, &[b"123456789"], "1234\n[…]\n6789", 1, false);
        check(8, &[b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9"], "1234\n[…]\n6789", 1, false);
        check(0, &[b"abc"], "[…]\n", 3, false);
        // 'ộ' is three bytes: one is left of the cut and goes; two are right of it and go.
        check(8, &["abcộ1234567ộz".as_bytes()], "abc\n[…]\nộz", 10, false);
        check(8, &["1234567890aộ".as_bytes()], "1234\n[…]\naộ", 6, false);
        check(6, &["12345678ộộ".as_bytes()], "123\n[…]\nộ", 8, false);
        // Whole lines where they fit.
        check(12, &[b"abc\nde_______f\nghij"], "abc\n[…]\nghij", 11, false);
        check(16, &[b"a\xffb"], "a\u{fffd}b", 0, true);
        check(4, &[b"\xff123456\xfe"], "\u{fffd}1\n[…]\n6\u{fffd}", 4, true);
    }
}
