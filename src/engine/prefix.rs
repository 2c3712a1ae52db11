//! The prefix cache: a radix tree over token ids whose nodes hold the keys and values of their whole path.
//!
//! Blocks are shared, so a node costs only what its path does not share with others. A hit is found by comparing ids,
//! never by a hash alone. The least recently used leaves go when the byte budget is exceeded; pinned ones go last.

use std::collections::HashSet;

use crate::model::Kv;

pub(crate) struct PrefixCache {
    roots: Vec<Node>,
    bytes_max: usize,
    clock: u64,
    stats: CacheStats,
}

/// What the cache holds and has done since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    pub bytes: usize,
    pub nodes: usize,
    pub lookups: u64,
    pub hits: u64,
    pub hit_tokens: u64,
    pub evictions: u64,
}

struct Node {
    /// The ids from the parent's end to this node's end; never empty.
    edge: Vec<u32>,
    /// Of the whole path from the root.
    kv: Kv,
    children: Vec<Node>,
    last_used: u64,
    pinned: bool,
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl PrefixCache {
    pub fn new(bytes_max: usize) -> Self {
        PrefixCache { roots: Vec::new(), bytes_max, clock: 0, stats: CacheStats::default() }
    }

    /// The longest cached prefix of `ids`, at most `limit` tokens of it; its length is the KV's.
    pub fn lookup(&mut self, ids: &[u32], limit: usize) -> Option<Kv> {
        self.clock += 1;
        self.stats.lookups += 1;
        let (clock, mut at, mut nodes, mut best) = (self.clock, 0, &mut self.roots, None);
        while let Some(node) = nodes.iter_mut().find(|node| ids[at..].first() == node.edge.first()) {
            let n = common(&node.edge, &ids[at..]);
            node.last_used = clock;
            at += n;
            best = Some(&node.kv);
            if n < node.edge.len() {
                break;
            }
            nodes = &mut node.children;
        }
        let len = at.min(limit);
        let mut kv = best.filter(|_| len > 0)?.clone();
        kv.truncate(len);
        self.stats.hits += 1;
        self.stats.hit_tokens += len as u64;
        Some(kv)
    }

    /// Keeps `kv`, which holds exactly `ids`.
    pub fn insert(&mut self, ids: &[u32], kv: &Kv, pinned: bool) {
        assert_eq!(ids.len(), kv.len(), "the KV is of other tokens");
        self.clock += 1;
        if !ids.is_empty() {
            insert(&mut self.roots, ids, 0, kv, pinned, self.clock);
        }
        self.evict();
    }

    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    /// Bytes of all blocks held, each counted once.
    fn bytes(&self) -> (usize, usize) {
        fn walk(nodes: &[Node], seen: &mut HashSet<usize>, bytes: &mut usize, count: &mut usize) {
            for node in nodes {
                *count += 1;
                for (id, size) in node.kv.parts() {
                    if seen.insert(id) {
                        *bytes += size;
                    }
                }
                walk(&node.children, seen, bytes, count);
            }
        }
        let (mut seen, mut bytes, mut count) = (HashSet::new(), 0, 0);
        walk(&self.roots, &mut seen, &mut bytes, &mut count);
        (bytes, count)
    }

    fn evict(&mut self) {
        loop {
            (self.stats.bytes, self.stats.nodes) = self.bytes();
            if self.stats.bytes <= self.bytes_max {
                return;
            }
            // A pinned leaf goes only when nothing else is left: the budget holds in any case.
            let Some(age) = oldest_leaf(&self.roots, false).or_else(|| oldest_leaf(&self.roots, true)) else { return };
            remove_leaf(&mut self.roots, age);
            self.stats.evictions += 1;
        }
    }
}

fn insert(nodes: &mut Vec<Node>, ids: &[u32], at: usize, kv: &Kv, pinned: bool, clock: u64) {
    let rest = &ids[at..];
    let Some(i) = nodes.iter().position(|node| node.edge[0] == rest[0]) else {
        nodes.push(Node { edge: rest.to_vec(), kv: kv.clone(), children: Vec::new(), last_used: clock, pinned });
        return;
    };
    let node = &mut nodes[i];
    let n = common(&node.edge, rest);
    if n < node.edge.len() {
        // Split: the upper part becomes a node of its own, with the same blocks.
        let mut upper_kv = node.kv.clone();
        upper_kv.truncate(at + n);
        let lower_edge = node.edge.split_off(n);
        let edge = std::mem::replace(&mut node.edge, lower_edge);
        let upper = Node { edge, kv: upper_kv, children: Vec::new(), last_used: clock, pinned: false };
        let lower = std::mem::replace(node, upper);
        node.children.push(lower);
    }
    node.last_used = clock;
    if n == rest.len() {
        node.pinned |= pinned;
    } else {
        insert(&mut node.children, ids, at + n, kv, pinned, clock);
    }
}

/// When the least recently used leaf was last used. `pinned`: look at pinned leaves too.
fn oldest_leaf(nodes: &[Node], pinned: bool) -> Option<u64> {
    nodes
        .iter()
        .filter_map(|node| match node.children.is_empty() {
            true => (pinned || !node.pinned).then_some(node.last_used),
            false => oldest_leaf(&node.children, pinned),
        })
        .min()
}

/// Removes one leaf of that age; equal ages lie on one path, so a leaf of that age is unique enough.
fn remove_leaf(nodes: &mut Vec<Node>, age: u64) -> bool {
    for i in 0..nodes.len() {
        if nodes[i].children.is_empty() {
            if nodes[i].last_used == age {
                nodes.remove(i);
                return true;
            }
        } else if remove_leaf(&mut nodes[i].children, age) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KvType;
    use crate::model::kv::{BLOCK, KvShape};
    use proptest::prelude::*;

    const SHAPE: KvShape = KvShape { layers: 1, kv_heads: 1, head_dim: 16, kind: KvType::F16 };

    /// A KV of `ids`, continued from what the cache has.
    fn filled(cache: &mut PrefixCache, ids: &[u32]) -> (Kv, usize) {
        let mut kv = cache.lookup(ids, ids.len()).unwrap_or_else(|| Kv::blocks(SHAPE));
        let hit = kv.len();
        kv.reserve(ids.len() - hit);
        kv.advance(ids.len() - hit);
        (kv, hit)
    }

    #[test]
    fn a_shared_prefix_is_found_and_its_blocks_are_shared() {
        let mut cache = PrefixCache::new(usize::MAX);
        let a: Vec<u32> = (0..200).collect();
        let mut b = a.clone();
        b[130..].iter_mut().for_each(|x| *x += 1000);
        let (kv, hit) = filled(&mut cache, &a);
        assert_eq!(hit, 0);
        cache.insert(&a, &kv, false);
        let (kv, hit) = filled(&mut cache, &b);
        assert_eq!(hit, 130);
        cache.insert(&b, &kv, false);
        // 4 blocks of `a`, and of `b` the two from position 128 on.
        assert_eq!(cache.stats().bytes, 6 * SHAPE.block_bytes());
        assert_eq!(cache.lookup(&a, 199).unwrap().len(), 199);
        assert_eq!(cache.lookup(&a[..50], 49).unwrap().len(), 49);
        assert!(cache.lookup(&[7], 1).is_none());
        assert!(cache.lookup(&a, 0).is_none());
    }

    #[test]
    fn the_budget_holds_and_pinned_prefixes_go_last() {
        let mut cache = PrefixCache::new(6 * SHAPE.block_bytes());
        let pinned: Vec<u32> = (0..BLOCK as u32 * 2).collect();
        let (kv, _) = filled(&mut cache, &pinned);
        cache.insert(&pinned, &kv, true);
        for i in 0..20 {
            let ids: Vec<u32> = pinned.iter().copied().chain((0..100).map(|j| 10_000 + 1000 * i + j)).collect();
            let (kv, hit) = filled(&mut cache, &ids);
            assert_eq!(hit, pinned.len(), "the pinned prefix stays");
            cache.insert(&ids, &kv, false);
            assert!(cache.stats().bytes <= 6 * SHAPE.block_bytes());
        }
        assert!(cache.stats().evictions >= 18);
        let large: Vec<u32> = (50_000..50_000 + BLOCK as u32 * 9).collect();
        let (kv, _) = filled(&mut cache, &large);
        cache.insert(&large, &kv, true);
        assert!(cache.stats().bytes <= 6 * SHAPE.block_bytes(), "even a pinned one that is too large");
    }

    proptest! {
        /// Against the naive answer: the longest common prefix with anything inserted.
        #[test]
        fn lookup_equals_the_naive_search(inserted in prop::collection::vec(prop::collection::vec(0u32..3, 1..12), 1..12),
                                          asked in prop::collection::vec(0u32..3, 1..12)) {
            let mut cache = PrefixCache::new(usize::MAX);
            for ids in &inserted {
                let (kv, _) = filled(&mut cache, ids);
                cache.insert(ids, &kv, false);
            }
            let naive = inserted.iter().map(|ids| common(ids, &asked)).max().unwrap();
            prop_assert_eq!(cache.lookup(&asked, asked.len()).map_or(0, |kv| kv.len()), naive);
        }
    }
}
