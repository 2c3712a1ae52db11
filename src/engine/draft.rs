//! Prompt lookup: what followed the last few tokens when they stood there before is a draft of what follows now.
//!
//! A draft costs nothing but its rows in the next forward pass, and it can be wrong: every token is sampled from its own logits as if
//! there had been no draft, so the output is the same with and without. Source: prompt-lookup decoding (apoorvumang, 2023).

use std::collections::HashMap;

/// Tokens that must agree before a draft is made of what followed them.
const MATCHED: usize = 3;
/// Rows of a pass that decodes, the true one included.
const ROWS_MAX: usize = 16;
/// The first draft, and the one after a draft that was wrong at once.
const ROWS_FIRST: usize = 4;
/// After drafts that were wrong at once no more are made for a while, longer each time.
const PAUSE_MAX: usize = 64;

pub(crate) struct Drafter {
    /// The last [`MATCHED`] tokens of a place → where it ends; the latest place of all that are known.
    places: HashMap<[u32; MATCHED], usize>,
    /// Places that end up to here are in it.
    indexed: usize,
    /// The next draft has one token less.
    rows: usize,
    /// Tokens until the next draft is made.
    wait: usize,
    pause: usize,
}

impl Drafter {
    pub fn new() -> Self {
        Drafter { places: HashMap::new(), indexed: 0, rows: ROWS_FIRST, wait: 0, pause: 1 }
    }

    /// What may follow `tokens`: at most `limit` tokens, none where nothing is known or drafts have not been worth it of late.
    /// `token(i)`: the i-th of `len` tokens.
    pub fn draft(&mut self, len: usize, token: impl Fn(usize) -> u32, limit: usize) -> Vec<u32> {
        self.indexed = self.indexed.min(len);
        if self.wait > 0 {
            self.wait -= 1;
            return Vec::new();
        }
        let key = |end: usize| std::array::from_fn(|i| token(end - MATCHED + i));
        // The place that the sequence itself ends at has nothing behind it.
        while self.indexed + 1 < len {
            self.indexed += 1;
            if self.indexed >= MATCHED {
                self.places.insert(key(self.indexed), self.indexed);
            }
        }
        if len < MATCHED {
            return Vec::new();
        }
        let wanted: [u32; MATCHED] = key(len);
        let Some(&end) = self.places.get(&wanted) else { return Vec::new() };
        // A rewind may have taken back what stood there.
        if end >= len || key(end) != wanted {
            return Vec::new();
        }
        (end..len).take(limit.min(self.rows - 1)).map(token).collect()
    }

    /// How many tokens of a draft came true.
    pub fn judge(&mut self, drafted: usize, came_true: usize) {
        if came_true == drafted {
            self.rows = (self.rows * 2).min(ROWS_MAX);
            self.pause = 1;
        } else if came_true * 2 >= drafted {
            self.pause = 1;
        } else if came_true == 0 {
            self.rows = ROWS_FIRST;
            self.pause = (self.pause * 2).min(PAUSE_MAX);
            self.wait = self.pause;
        } else {
            self.rows = ROWS_FIRST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(drafter: &mut Drafter, tokens: &[u32]) -> Vec<u32> {
        drafter.draft(tokens.len(), |i| tokens[i], 100)
    }

    #[test]
    fn what_followed_before_follows_again() {
        let mut drafter = Drafter::new();
        assert_eq!(draft(&mut drafter, &[1, 2]).len(), 0);
        assert_eq!(draft(&mut drafter, &[1, 2, 3, 4, 5, 6, 7]).len(), 0);
        assert_eq!(draft(&mut drafter, &[1, 2, 3, 4, 5, 6, 7, 1, 2, 3]), [4, 5, 6]);
        drafter.judge(3, 3);
        assert_eq!(draft(&mut drafter, &[1, 2, 3, 4, 5, 6, 7, 1, 2, 3]), [4, 5, 6, 7, 1, 2, 3]);
        // The latest place counts.
        let mut drafter = Drafter { rows: ROWS_MAX, ..Drafter::new() };
        assert_eq!(draft(&mut drafter, &[1, 2, 3, 4, 1, 2, 3, 9, 9, 1, 2, 3]), [9, 9, 1, 2, 3]);
        // After a rewind the places of what was taken back are not used.
        let mut drafter = Drafter::new();
        assert_eq!(draft(&mut drafter, &[1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7]), [8, 5, 6]);
        assert_eq!(draft(&mut drafter, &[1, 2, 3, 4, 5, 5, 6, 7]).len(), 0);
    }

    #[test]
    fn drafts_that_are_wrong_become_rare() {
        let mut drafter = Drafter::new();
        let tokens: Vec<u32> = [1, 2, 3].repeat(5);
        let mut made = 0;
        for _ in 0..300 {
            let draft = draft(&mut drafter, &tokens);
            if !draft.is_empty() {
                made += 1;
                drafter.judge(draft.len(), 0);
            }
        }
        assert!(made < 12, "{made}");
        drafter.wait = 0;
        assert_eq!(draft(&mut drafter, &tokens).len(), ROWS_FIRST - 1);
    }
}
