//! The process group of one child.

use std::time::{Duration, Instant};

use super::LINGER_GRACE;

/// Kills the group when it is dropped unfinished.
///
/// The number stays taken as long as any process is in the group, so a signal reaches ours or no one; only between the
/// last member's end and the signal could it be given to another group, a window of microseconds in a cycle of
/// thousands of numbers.
pub(super) struct Group {
    id: Option<i32>,
    /// Something was found alive after the child's own end.
    pub(super) left_behind: bool,
}

impl Group {
    pub(super) fn new(leader: Option<u32>) -> Self {
        Group { id: leader.and_then(|id| i32::try_from(id).ok()).filter(|&id| id > 1), left_behind: false }
    }

    pub(super) fn signal(&mut self, signal: i32) {
        if let Some(id) = self.id {
            // SAFETY: kill touches no memory of ours; `id` > 1, so it means one group, not all processes.
            unsafe { libc::kill(-id, signal) };
        }
    }

    /// Kills what is left; whether the child, having ended by `itself`, left something behind.
    pub(super) async fn finish(mut self, itself: bool) -> bool {
        let started = Instant::now();
        while itself && !self.left_behind && self.alive() {
            if started.elapsed() >= LINGER_GRACE {
                self.left_behind = true;
            } else {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        self.left_behind && itself
    }

    fn alive(&self) -> bool {
        let Some(id) = self.id else { return false };
        // SAFETY: as above; signal 0 only asks.
        let exists = unsafe { libc::kill(-id, 0) } == 0;
        exists && has_running_member(id)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
    }
}

/// Dead processes that nobody has collected still count as members, for ever under an init that does not collect.
#[cfg(target_os = "linux")]
fn has_running_member(group: i32) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return true };
    processes.flatten().any(|process| {
        let Ok(stat) = std::fs::read(process.path().join("stat")) else { return false };
        // "pid (name) state parent group …"; the name may hold anything, parentheses too.
        let Some(end) = stat.iter().rposition(|&byte| byte == b')') else { return false };
        let fields = String::from_utf8_lossy(&stat[end + 1..]);
        let mut fields = fields.split_whitespace();
        let state = fields.next().unwrap_or("Z");
        let of_group = fields.nth(1).and_then(|field| field.parse().ok()) == Some(group);
        of_group && !matches!(state, "Z" | "X")
    })
}

#[cfg(not(target_os = "linux"))]
fn has_running_member(_: i32) -> bool {
    true
}
