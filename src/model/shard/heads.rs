//! Splits attention heads over the ranks of a stage.
//!
//! Ranks get KV heads with all their query heads, by their shares. If there are more ranks than KV heads,
//! several ranks have a copy of each KV head and share its query heads; a rank with a large share shares its
//! KV head with few others, or with none.
//!
//! Invariant: the query heads of a rank are evenly distributed over its KV heads, as attention requires.

use super::{lcm, split_by_shares};
use crate::model::spec::{AttentionSpec, ColumnSplit};
use std::ops::Range;

/// The sizes that determine how heads can be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSplit {
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Block size of the output projection, whose columns are the values of one head after another.
    pub block: usize,
}

/// The heads of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankHeads {
    pub query: Range<usize>,
    pub kv: Range<usize>,
}

impl HeadSplit {
    /// Returns the split of an attention's heads; `block` is the block size of its output projection.
    pub fn for_attention(attention: &AttentionSpec, block: usize) -> HeadSplit {
        let (heads, kv_heads) = (attention.heads, attention.kv_heads);
        HeadSplit { heads, kv_heads, v_dim: attention.head_output_dim(), block }
    }

    /// Returns the number of query heads that share a KV head.
    fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the number of consecutive KV heads, with their query heads, that must stay together so that
    /// blocks are not split.
    fn kv_granule(&self) -> usize {
        head_granule(self.group_size() * self.v_dim, self.block)
    }

    /// Returns the maximum number of ranks, at least one. KV heads are only shared by ranks if each KV head
    /// ends at a block boundary.
    pub fn max_ranks(&self) -> usize {
        match self.kv_granule() {
            1 => self.kv_heads * self.max_ranks_per_kv_head(),
            several => (self.kv_heads / several).max(1),
        }
    }

    /// Returns the maximum number of ranks that can share the query heads of one KV head.
    fn max_ranks_per_kv_head(&self) -> usize {
        self.group_size() / head_granule(self.v_dim, self.block)
    }

    /// Splits the heads by shares, for at most [`HeadSplit::max_ranks`] ranks. If there are more ranks than
    /// KV heads, each KV head is assigned to several ranks, which share its query heads.
    pub fn by_rank(&self, shares: &[u32]) -> Vec<RankHeads> {
        let (rank_count, group) = (shares.len(), self.group_size());
        let kv_granule = self.kv_granule();
        if rank_count == 1 || rank_count * kv_granule <= self.kv_heads {
            let of = |kv: Range<usize>| RankHeads { query: kv.start * group..kv.end * group, kv };
            return split_by_shares(self.kv_heads, kv_granule, shares).into_iter().map(of).collect();
        }
        let of_kv_head = |(kv, ranks): (usize, Range<usize>)| {
            let parts = split_by_shares(group, head_granule(self.v_dim, self.block), &shares[ranks]);
            parts.into_iter().map(move |part| RankHeads {
                query: kv * group + part.start..kv * group + part.end,
                kv: kv..kv + 1,
            })
        };
        self.ranks_by_kv_head(shares).into_iter().enumerate().flat_map(of_kv_head).collect()
    }

    /// Returns the range of ranks of each KV head. Each range ends where the cumulative shares are nearest to
    /// the cumulative fraction of KV heads, and leaves enough ranks for those that follow.
    fn ranks_by_kv_head(&self, shares: &[u32]) -> Vec<Range<usize>> {
        let (rank_count, most) = (shares.len(), self.max_ranks_per_kv_head());
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
pub(super) fn qk_splits(by_rank: &[RankHeads], rank: usize, width: usize) -> (ColumnSplit, ColumnSplit) {
    let wide = |heads: &Range<usize>| heads.start * width..heads.end * width;
    let queries = by_rank.iter().map(|heads| heads.query.len() * width).collect();
    let is_first = |rank: usize| rank == 0 || by_rank[rank - 1].kv != by_rank[rank].kv;
    let keys = (0..by_rank.len()).map(|at| if is_first(at) { by_rank[at].kv.len() * width } else { 0 });
    let own = &by_rank[rank];
    (
        ColumnSplit { widths: queries, local: wide(&own.query) },
        ColumnSplit { widths: keys.collect(), local: wide(&own.kv) },
    )
}

/// Returns how many items of that width end at a block boundary.
fn head_granule(width: usize, block: usize) -> usize {
    lcm(width, block) / width
}
