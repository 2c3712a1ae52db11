//! Where a prompt does not begin as the one before it did, so that what was cached of it is of no use.

use crate::chat::template::Prompt;
use crate::chat::tokenizer::Tokenizer;

/// Characters that are shown before and after the first that differs.
const SHOWN_BEFORE: usize = 24;
const SHOWN_AFTER: usize = 48;

/// The first difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Break {
    /// Tokens that both prompts begin with.
    pub common_tokens: usize,
    /// Tokens of the first prompt that must be read again, or that are gone.
    pub lost_tokens: usize,
    pub before: Side,
    pub after: Side,
}

/// One side of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// As in [`Prompt::segments`]; `end` behind the last.
    pub segment: String,
    /// The segment's text around the first character that differs.
    pub text: String,
}

/// Where `after` does not go on as `before` did. Between two turns the frame that asks for a reply gives way to the reply, and a
/// reminder can follow the last message: that is no break, nor is a token at that place that took in what follows.
pub fn first_break(before: &Prompt, after: &Prompt, tokenizer: &Tokenizer) -> Option<Break> {
    let kept = match before.segments.last() {
        Some((name, range)) if name == "template" => range.start,
        _ => before.ids.len(),
    };
    let common = before.ids.iter().zip(&after.ids).take_while(|(a, b)| a == b).count();
    if common + 1 >= kept {
        return None;
    }
    let texts = [before, after].map(|prompt| segment(prompt, common, tokenizer));
    let same = texts[0].1.chars().zip(texts[1].1.chars()).take_while(|(a, b)| a == b).count();
    let [before, after] = texts.map(|(segment, text)| Side { segment, text: excerpt(&text, same) });
    Some(Break { common_tokens: common, lost_tokens: kept - common, before, after })
}

/// Name and text of the segment that holds a token.
fn segment(prompt: &Prompt, at: usize, tokenizer: &Tokenizer) -> (String, String) {
    match prompt.segments.iter().find(|(_, range)| range.contains(&at)) {
        Some((name, range)) => {
            (name.clone(), String::from_utf8_lossy(&tokenizer.decode(&prompt.ids[range.clone()])).into())
        }
        None => ("end".into(), String::new()),
    }
}

fn excerpt(text: &str, at: usize) -> String {
    let from = at.saturating_sub(SHOWN_BEFORE);
    let shown: String = text.chars().skip(from).take(SHOWN_BEFORE + SHOWN_AFTER).collect();
    let rest = text.chars().count() > from + SHOWN_BEFORE + SHOWN_AFTER;
    format!("{}{shown}{}", if from > 0 { "…" } else { "" }, if rest { "…" } else { "" })
}
