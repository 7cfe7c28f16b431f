//! Splits attention heads over the ranks of a stage.
//!
//! Ranks get KV heads with all their query heads, by their shares. If there are more ranks than KV heads,
//! several ranks have a copy of each KV head and share its query heads; a rank with a large share shares its
//! KV head with few others, or with none.
//!
//! Invariant: the query heads of a rank are evenly distributed over its KV heads, as attention requires.

use super::{divided, lcm};
use crate::model::spec::{AttentionSpec, Spread};
use std::ops::Range;

/// The sizes that determine how heads can be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Block size of the output projection, whose columns are the values of one head after another.
    pub block: usize,
}

/// The heads of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heads {
    pub query: Range<usize>,
    pub kv: Range<usize>,
}

impl Deal {
    pub fn of(attention: &AttentionSpec, block: usize) -> Deal {
        let AttentionSpec { heads, kv_heads, v_dim, .. } = *attention;
        Deal { heads, kv_heads, v_dim, block }
    }

    /// Returns the number of query heads that share a KV head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the number of consecutive KV heads, with their query heads, that must stay together so that
    /// blocks are not split.
    fn kv_granule(&self) -> usize {
        granule(self.group() * self.v_dim, self.block)
    }

    /// Returns the maximum number of ranks. KV heads are only shared by ranks if each KV head ends at a block
    /// boundary.
    pub fn members_max(&self) -> usize {
        match self.kv_granule() {
            1 => self.kv_heads * self.sharers_max(),
            several => self.kv_heads / several,
        }
    }

    /// Returns the maximum number of ranks that can share the query heads of one KV head.
    fn sharers_max(&self) -> usize {
        self.group() / granule(self.v_dim, self.block)
    }

    /// Splits the heads by shares, for at most [`HeadSplit::max_ranks`] ranks. If there are more ranks than
    /// KV heads, each KV head is assigned to several ranks, which share its query heads.
    pub fn by_rank(&self, shares: &[u32]) -> Vec<Heads> {
        let (rank_count, group) = (shares.len(), self.group());
        let kv_granule = self.kv_granule();
        if rank_count * kv_granule <= self.kv_heads {
            let of = |kv: Range<usize>| Heads { query: kv.start * group..kv.end * group, kv };
            return divided(self.kv_heads, kv_granule, shares).into_iter().map(of).collect();
        }
        let of_kv_head = |(kv, ranks): (usize, Range<usize>)| {
            let parts = divided(group, granule(self.v_dim, self.block), &shares[ranks]);
            parts.into_iter().map(move |part| Heads {
                query: kv * group + part.start..kv * group + part.end,
                kv: kv..kv + 1,
            })
        };
        self.sharers(shares).into_iter().enumerate().flat_map(of_kv_head).collect()
    }

    /// Returns the range of ranks of each KV head. Each range ends where the cumulative shares are nearest to
    /// the cumulative fraction of KV heads, and leaves enough ranks for those that follow.
    fn sharers(&self, shares: &[u32]) -> Vec<Range<usize>> {
        let (rank_count, most) = (shares.len(), self.sharers_max());
        let up_to = |end: usize| shares[..end].iter().map(|share| u128::from(*share)).sum::<u128>();
        let mut end = 0;
        let runs = (1..=self.kv_heads).map(|given| {
            let (first, behind) = (end, self.kv_heads - given);
            let fewest = (first + 1).max(rank_count.saturating_sub(behind * most));
            let ends = fewest..=(first + most).min(rank_count - behind);
            let meant = up_to(rank_count) * given as u128;
            let distance = |end: &usize| (up_to(*end) * self.kv_heads as u128).abs_diff(meant);
            end = ends.min_by_key(distance).expect("there are at most max_ranks ranks; this is a bug");
            first..end
        });
        runs.collect()
    }
}

/// Returns how the queries and keys of a stage, with heads of this width, lie side by side. A KV head that
/// several ranks have is contributed by the first of them.
pub(super) fn spread(by_rank: &[Heads], rank: usize, width: usize) -> (Spread, Spread) {
    let wide = |heads: &Range<usize>| heads.start * width..heads.end * width;
    let queries = by_rank.iter().map(|heads| heads.query.len() * width).collect();
    let is_first = |rank: usize| rank == 0 || by_rank[rank - 1].kv != by_rank[rank].kv;
    let keys = (0..by_rank.len()).map(|at| if is_first(at) { by_rank[at].kv.len() * width } else { 0 });
    let own = &by_rank[rank];
    (Spread { widths: queries, own: wide(&own.query) }, Spread { widths: keys.collect(), own: wide(&own.kv) })
}

/// Returns how many items of that width end at a block boundary.
fn granule(width: usize, block: usize) -> usize {
    lcm(width, block) / width
}
