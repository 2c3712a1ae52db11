//! Whether a model fits into the memory that is free now.

use std::path::Path;

use super::{HubError, Kind, human_bytes};

/// The bytes that this process may still take: `MemAvailable`, or what a control group leaves if that is less.
/// `None` where the system does not say (not Linux).
pub fn available_bytes() -> Option<u64> {
    available_from(Path::new("/"))
}

/// Compares what loading needs (weights, and KV at the asked context) with what is free.
///
/// # Errors
/// [`Kind::NoMemory`], with both numbers.
pub fn memory_check(needed_bytes: u64, available_bytes: u64) -> Result<(), HubError> {
    if needed_bytes <= available_bytes {
        return Ok(());
    }
    Err(HubError::new(
        Kind::NoMemory,
        format!(
            "the model needs {} of memory ({needed_bytes} bytes), and {} are free ({available_bytes} bytes); \
             choose a smaller model, lower --context-tokens, or free memory",
            human_bytes(needed_bytes),
            human_bytes(available_bytes)
        ),
    ))
}

/// `root` is `/`, or a folder that looks like it in a test.
fn available_from(root: &Path) -> Option<u64> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let system: u64 = kib.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)?;
    Some(cgroup_room(root).map_or(system, |room| room.min(system)))
}

/// The least room of the control groups this process is in. A limit holds for a group and everything below it, so all
/// ancestors are looked at; in a container the path of the group itself is often not mounted, and only the root is.
fn cgroup_room(root: &Path) -> Option<u64> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (mount, limit, usage, reclaimable) = if controllers.is_empty() {
            ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file ")
        } else if controllers.split(',').any(|c| c == "memory") {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        } else {
            continue;
        };
        let mount = root.join(mount);
        let mut folder = mount.join(group.trim_start_matches('/'));
        loop {
            if let (Some(limit), Some(used)) = (number(&folder.join(limit)), number(&folder.join(usage))) {
                // The file cache that can be dropped counts as used, but is room.
                let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
                let cache =
                    stat.lines().find_map(|line| line.strip_prefix(reclaimable)?.trim().parse().ok()).unwrap_or(0);
                let room = limit.saturating_sub(used.saturating_sub(cache));
                least = Some(least.map_or(room, |l: u64| l.min(room)));
            }
            if folder == mount || !folder.pop() {
                break;
            }
        }
    }
    least
}

/// `None` for `max` and for what is not there.
fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_of_system_and_control_group_counts() {
        let check = |files: &[(&str, &str)], expected: Option<u64>| {
            let root = tempfile::tempdir().unwrap();
            for (path, text) in files {
                let path = root.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            assert_eq!(available_from(root.path()), expected, "{files:?}");
        };
        let meminfo = ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    1000 kB\n");
        check(&[], None);
        check(&[meminfo], Some(1_024_000));
        let v2 = ("proc/self/cgroup", "0::/a/b\n");
        check(
            &[meminfo, v2, ("sys/fs/cgroup/a/memory.max", "500000"), ("sys/fs/cgroup/a/memory.current", "300000")],
            Some(200_000),
        );
        check(
            &[
                meminfo,
                v2,
                ("sys/fs/cgroup/a/b/memory.max", "max"),
                ("sys/fs/cgroup/memory.max", "500000"),
                ("sys/fs/cgroup/memory.current", "300000"),
                ("sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 50000\n"),
            ],
            Some(250_000),
        );
        let v1 = ("proc/self/cgroup", "5:cpu,memory:/x\n");
        check(
            &[
                meminfo,
                v1,
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "300000"),
            ],
            Some(1_024_000),
        );
    }

    #[test]
    fn a_refusal_has_both_numbers() {
        assert!(memory_check(5, 5).is_ok());
        let refusal = memory_check(2_000_000_000, 1_500_000_000).unwrap_err();
        assert_eq!(refusal.kind, Kind::NoMemory);
        for part in ["2.00 GB", "2000000000", "1.50 GB", "1500000000"] {
            assert!(refusal.to_string().contains(part), "{refusal}");
        }
    }
}
