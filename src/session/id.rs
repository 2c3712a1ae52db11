//! Session ids: `20261130-165043-x7k2`, the UTC second of the start and four random characters. They sort by time,
//! can be read aloud, and are safe as file names.

use std::hash::{BuildHasher, Hasher};

/// 64 bits that differ from call to call and from process to process. Not for secrets.
pub fn random_u64() -> u64 {
    // A system without a source of randomness still gives distinct ids, by the process and the hasher's own seed.
    getrandom::u64().unwrap_or_else(|_| {
        let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        hasher.finish()
    })
}

/// A new id for a session that starts at `time_ms` (milliseconds since 1970).
pub(super) fn new_id(time_ms: u64) -> String {
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let mut random = random_u64();
    let mut tail = String::with_capacity(4);
    for _ in 0..4 {
        tail.push(ALPHABET[(random % 32) as usize] as char);
        random /= 32;
    }
    let (date, time) = utc(time_ms);
    format!("{}-{}-{tail}", date.replace('-', ""), time.replace(':', ""))
}

/// `("2026-11-30", "16:50:43")`.
pub fn utc(time_ms: u64) -> (String, String) {
    let seconds = time_ms / 1000;
    let (year, month, day) = civil(seconds / 86_400);
    let of_day = seconds % 86_400;
    (
        format!("{year:04}-{month:02}-{day:02}"),
        format!("{:02}:{:02}:{:02}", of_day / 3600, of_day / 60 % 60, of_day % 60),
    )
}

/// Days since 1970-01-01 → (year, month, day). Years are counted from March, so that the leap day comes last.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let of_era = shifted % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

/// Whether `id` can name a session: letters, digits, `-` and `_`, at most 64, the first one a letter or a digit. What
/// passes cannot leave the folder of the sessions.
pub fn is_valid(id: &str) -> bool {
    id.len() <= 64
        && id.starts_with(|c: char| c.is_ascii_alphanumeric())
        && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        let check = |time_ms, date: &str, time: &str| assert_eq!(utc(time_ms), (date.to_owned(), time.to_owned()));
        check(0, "1970-01-01", "00:00:00");
        check(951_782_399_000, "2000-02-28", "23:59:59");
        check(951_782_400_000, "2000-02-29", "00:00:00");
        check(1_709_251_199_999, "2024-02-29", "23:59:59");
        check(4_107_542_400_000, "2100-03-01", "00:00:00");
    }

    #[test]
    fn ids_are_valid_sort_by_time_and_differ() {
        let ids: std::collections::HashSet<String> = (0..100).map(|_| new_id(1_764_521_443_000)).collect();
        assert!(ids.len() > 95, "{ids:?}");
        assert!(ids.iter().all(|id| is_valid(id) && id.starts_with("20251130-165043-")), "{ids:?}");
        assert!(new_id(1_764_521_443_000) < new_id(1_764_521_444_000));
    }

    #[test]
    fn ids_that_are_refused() {
        for id in ["", ".", "..", "../x", "a/b", "-a", "_a", "a b", "a.jsonl", "ä", "a\0", &"a".repeat(65)] {
            assert!(!is_valid(id), "{id:?}");
        }
    }
}
