//! Heads of attention over the members of a stage.
//!
//! Members have KV heads, with all their query heads, by their shares. Where members are more than KV heads, each KV head is
//! with several, who have its query heads by their shares; who has a large share is with few others, or alone.
//! Invariant: a member's query heads share its KV heads evenly, as attention needs them.

use super::{divided, lcm};
use crate::model::spec::{AttentionSpec, Spread};
use std::ops::Range;

/// What decides how heads can be dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    pub heads: usize,
    pub kv_heads: usize,
    /// Values of a head.
    pub v_dim: usize,
    /// Numbers that the output projection has in a block: its columns are a head's values after another's.
    pub block: usize,
}

/// One member's heads.
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

    /// Query heads that share a KV head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// KV heads that stay together, with all their query heads.
    fn kv_granule(&self) -> usize {
        granule(self.group() * self.v_dim, self.block)
    }

    /// As many as can have some: of a KV head's query heads, where KV heads end with blocks.
    pub fn members_max(&self) -> usize {
        match self.kv_granule() {
            1 => self.kv_heads * self.sharers_max(),
            several => self.kv_heads / several,
        }
    }

    /// As many as can share one KV head's query heads.
    fn sharers_max(&self) -> usize {
        self.group() / granule(self.v_dim, self.block)
    }

    /// By rank, of no more members than can have some: KV heads with their query heads. Where there are more members than
    /// KV heads, each of those has some of the members, which share its query heads.
    pub fn by_rank(&self, shares: &[u32]) -> Vec<Heads> {
        let (members, group) = (shares.len(), self.group());
        let kv_granule = self.kv_granule();
        if members * kv_granule <= self.kv_heads {
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

    /// The ranks that have each KV head, in runs: each run ends where the shares up to there are nearest to what the KV heads
    /// up to there are of all, and leaves enough for those behind.
    fn sharers(&self, shares: &[u32]) -> Vec<Range<usize>> {
        let (members, most) = (shares.len(), self.sharers_max());
        let up_to = |end: usize| shares[..end].iter().map(|share| u128::from(*share)).sum::<u128>();
        let mut end = 0;
        let runs = (1..=self.kv_heads).map(|given| {
            let (first, behind) = (end, self.kv_heads - given);
            let fewest = (first + 1).max(members.saturating_sub(behind * most));
            let ends = fewest..=(first + most).min(members - behind);
            let meant = up_to(members) * given as u128;
            let distance = |end: &usize| (up_to(*end) * self.kv_heads as u128).abs_diff(meant);
            end = ends.min_by_key(distance).expect("members are no more than can have some; this is a bug");
            first..end
        });
        runs.collect()
    }
}

/// How the stage's queries and keys, of heads that wide, lie side by side. Of those that several have, the first gives it.
pub(super) fn spread(by_rank: &[Heads], rank: usize, width: usize) -> (Spread, Spread) {
    let wide = |heads: &Range<usize>| heads.start * width..heads.end * width;
    let queries = by_rank.iter().map(|heads| heads.query.len() * width).collect();
    let is_first = |rank: usize| rank == 0 || by_rank[rank - 1].kv != by_rank[rank].kv;
    let keys = (0..by_rank.len()).map(|at| if is_first(at) { by_rank[at].kv.len() * width } else { 0 });
    let own = &by_rank[rank];
    (Spread { widths: queries, own: wide(&own.query) }, Spread { widths: keys.collect(), own: wide(&own.kv) })
}

/// So many things of that width end where a block does.
fn granule(width: usize, block: usize) -> usize {
    lcm(width, block) / width
}
