//! Tests of the properties of requests and of their independence.
//!
//! Invariant: the loads differ from the one below only in the parameters under test.

use std::time::Duration;

use super::*;
use crate::plan::prompts::PromptText;

fn load() -> LoadSpec {
    LoadSpec {
        requests: 2000,
        prompts: PromptSource::Ids { vocab: 7 },
        prompt: LengthDistribution::Uniform { low: 3, high: 9 },
        output: Some(LengthDistribution::Fixed(5)),
        trace: None,
        shared_prefix: 0,
        prefix_groups: 1,
        temperature: 0.5,
        seed: 1,
        ignore_eos: true,
        hangup_share: 0.0,
        hangup_after: 2,
        slow_share: 0.0,
        slow_rate: 100,
        models: 1,
        keys: 0,
    }
}

fn all(load: &LoadSpec) -> Vec<Request> {
    (0..load.requests).map(|index| load.request(index)).collect()
}

fn ids(request: &Request) -> &[u32] {
    let Prompt::Ids(ids) = &request.prompt else { panic!("{request:?}") };
    ids
}

fn words(request: &Request) -> Vec<&str> {
    let Prompt::Text(text) = &request.prompt else { panic!("{request:?}") };
    text.split(' ').collect()
}

fn texts() -> PromptSource {
    let text = |(prompt, prompt_len, output_len): (&str, u32, Option<u32>)| PromptText {
        prompt: prompt.into(),
        prompt_len,
        output_len,
    };
    PromptSource::Texts(
        [("one text", 2, Some(11)), ("another", 1, None), ("a third one", 3, Some(33))].map(text).into(),
    )
}

#[test]
fn requests_keep_their_bounds_and_reach_them() {
    let all = all(&load());
    let lens = all.iter().map(|request| ids(request).len());
    assert_eq!((lens.clone().min(), lens.max()), (Some(3), Some(9)));
    let sampled = all.iter().flat_map(|request| ids(request).iter().copied());
    assert_eq!((sampled.clone().min(), sampled.max()), (Some(0), Some(6)));
    assert!(all.iter().all(|request| request.output_len == 5));
    assert!(all.iter().all(|request| request.prompt_len as usize == ids(request).len()));
}

#[test]
fn a_request_depends_on_seed_and_index_only() {
    assert_eq!(load().request(4), LoadSpec { requests: 5, ..load() }.request(4));
    assert_ne!(load().request(4).prompt, load().request(5).prompt);
    assert_ne!(load().request(4).prompt, LoadSpec { seed: 2, ..load() }.request(4).prompt);
    assert_ne!(load().request(4).seed, load().request(5).seed);
}

#[test]
fn words_are_as_many_as_requested_and_many_kinds() {
    let all = all(&LoadSpec { prompts: PromptSource::Words, ..load() });
    assert!(all.iter().all(|request| words(request).len() == request.prompt_len as usize));
    let kinds: std::collections::BTreeSet<&str> = all.iter().flat_map(words).collect();
    assert!(kinds.len() > 500 && kinds.iter().all(|word| !word.is_empty()), "{}", kinds.len());
}

#[test]
fn prompts_share_their_prefix_within_a_group_and_with_no_other() {
    for prompts in [PromptSource::Ids { vocab: 50_000 }, PromptSource::Words] {
        let load = LoadSpec {
            prompts,
            prompt: LengthDistribution::Fixed(60),
            shared_prefix: 40,
            prefix_groups: 3,
            requests: 300,
            ..load()
        };
        let all = all(&load);
        let parts: Vec<(Vec<String>, Vec<String>)> = all.iter().map(|request| parts(request, 40)).collect();
        let mut prefixes: Vec<_> = parts.iter().map(|(prefix, _)| prefix).collect();
        prefixes.sort_unstable();
        let sizes: Vec<usize> = prefixes.chunk_by(|a, b| a == b).map(<[_]>::len).collect();
        assert!(sizes.len() == 3 && sizes.iter().all(|&size| (70..130).contains(&size)), "{sizes:?}");
        let mut rests: Vec<_> = parts.iter().map(|(_, rest)| rest).collect();
        rests.sort_unstable();
        rests.dedup();
        assert_eq!(rests.len(), 300, "the rest after the prefix is unique to each request");
        // The prefixes of two groups agree no more than by chance.
        prefixes.dedup();
        let agree = prefixes[0].iter().zip(prefixes[1]).filter(|(a, b)| a == b).count();
        assert!(agree < 5, "{agree}");
    }
}

/// Splits a prompt into its first `prefix` tokens or words and the rest.
fn parts(request: &Request, prefix: usize) -> (Vec<String>, Vec<String>) {
    let all: Vec<String> = match &request.prompt {
        Prompt::Ids(ids) => ids.iter().map(u32::to_string).collect(),
        Prompt::Text(text) => text.split(' ').map(str::to_owned).collect(),
    };
    (all[..prefix].to_vec(), all[prefix..].to_vec())
}

#[test]
fn a_prompt_shorter_than_its_prefix_is_the_prefixs_beginning() {
    let load = |low| LoadSpec { prompt: LengthDistribution::Fixed(low), shared_prefix: 40, ..load() };
    let (short, long) = (load(10).request(3), load(60).request(8));
    assert_eq!(ids(&short), &ids(&long)[..10]);
    assert_eq!(short.prompt_len, 10);
}

#[test]
fn texts_are_sampled_evenly_and_a_shared_prefix_goes_before_them() {
    let load = LoadSpec { prompts: texts(), output: None, ..load() };
    let all = all(&load);
    for (text, prompt_len, output_len) in [("one text", 2, 11), ("another", 1, 128), ("a third one", 3, 33)] {
        let those: Vec<_> =
            all.iter().filter(|request| request.prompt == Prompt::Text(text.into())).collect();
        assert!((600..735).contains(&those.len()), "{text}: {}", those.len());
        assert!(
            those.iter().all(|request| (request.prompt_len, request.output_len) == (prompt_len, output_len))
        );
    }
    let shared = LoadSpec { shared_prefix: 4, ..load.clone() };
    let (plain, prefixed) = (load.request(9), shared.request(9));
    assert_eq!(words(&prefixed)[4..], words(&plain));
    assert_eq!(words(&prefixed)[..4], words(&shared.request(10))[..4]);
    assert_eq!(prefixed.prompt_len, plain.prompt_len + 4);
}

#[test]
fn an_output_length_comes_from_the_trace_then_the_load_then_the_text() {
    let entry = |prompt_len, output_len| TraceEntry { due: Duration::ZERO, prompt_len, output_len };
    let trace = Some(Arc::from([entry(Some(4), Some(70)), entry(None, None)]));
    let lens =
        |load: LoadSpec| [0, 1, 2].map(|index| load.request(index)).map(|r| (r.prompt_len, r.output_len));
    let fixed = LoadSpec { prompt: LengthDistribution::Fixed(6), ..load() };
    assert_eq!(lens(LoadSpec { trace: trace.clone(), ..fixed.clone() }), [(4, 70), (6, 5), (4, 70)]);
    assert_eq!(
        lens(LoadSpec { trace: trace.clone(), output: None, ..fixed.clone() }),
        [(4, 70), (6, 128), (4, 70)]
    );
    let of_file = LoadSpec { prompts: texts(), trace, ..fixed };
    for (index, (_, output_len)) in lens(of_file.clone()).into_iter().enumerate() {
        assert_eq!(output_len, [70, 5, 70][index]);
        let own = LoadSpec { trace: None, ..of_file.clone() }.request(index);
        assert_eq!(
            own.prompt_len,
            of_file.request(index).prompt_len,
            "the prompt length of a trace does not affect texts"
        );
    }
}

/// A description, a change of the load, and a function that undoes the effect on a request.
type Change = (&'static str, fn(LoadSpec) -> LoadSpec, fn(Request) -> Request);

#[test]
fn to_change_one_thing_changes_no_other() {
    let base = LoadSpec {
        prompt: LengthDistribution::Uniform { low: 20, high: 40 },
        prompts: PromptSource::Ids { vocab: 1000 },
        ..load()
    };
    let changes: [Change; 7] = [
        ("hang-ups", |load| LoadSpec { hangup_share: 0.5, ..load }, |r| Request { hang_up_after: None, ..r }),
        ("slow readers", |load| LoadSpec { slow_share: 0.5, ..load }, |r| Request { read_rate: None, ..r }),
        ("models", |load| LoadSpec { models: 3, ..load }, |r| Request { model: 0, ..r }),
        ("keys", |load| LoadSpec { keys: 3, ..load }, |r| Request { key: None, ..r }),
        (
            "output lengths",
            |load| LoadSpec { output: "lognormal:50:1".parse().ok(), ..load },
            |r| Request { output_len: 5, ..r },
        ),
        ("groups", |load| LoadSpec { prefix_groups: 9, ..load }, |r| r),
        ("temperature", |load| LoadSpec { temperature: 1.0, ..load }, |r| Request { temperature: 0.5, ..r }),
    ];
    for (what, change, undo) in changes {
        let changed = change(base.clone());
        for index in 0..200 {
            assert_eq!(undo(changed.request(index)), base.request(index), "{what}");
        }
    }
    let shared = LoadSpec { shared_prefix: 8, ..base.clone() };
    assert!((0..200).all(|index| ids(&shared.request(index))[8..] == ids(&base.request(index))[8..]));
    let longer = LoadSpec { prompt: LengthDistribution::Fixed(50), ..base.clone() };
    assert!((0..200).all(|index| ids(&longer.request(index)).starts_with(ids(&base.request(index)))));
}

#[test]
fn shares_are_kept_and_fall_on_different_clients() {
    let counts = |share| {
        let all = all(&LoadSpec { hangup_share: share, slow_share: share, ..load() });
        let leaves = |request: &Request| request.hang_up_after == Some(2);
        let slow = |request: &Request| request.read_rate == Some(100);
        [
            all.iter().filter(|r| leaves(r)).count(),
            all.iter().filter(|r| slow(r)).count(),
            all.iter().filter(|r| leaves(r) && slow(r)).count(),
        ]
    };
    assert_eq!((counts(0.0), counts(1.0)), ([0; 3], [2000; 3]));
    let [leave, slow, both] = counts(0.3);
    assert!((530..670).contains(&leave) && (530..670).contains(&slow), "{leave} {slow}");
    assert!((130..230).contains(&both), "{both}");
}

#[test]
fn models_and_keys_are_evenly_spread_in_all_pairs() {
    let all = all(&LoadSpec { models: 3, keys: 2, requests: 6000, ..load() });
    let mut pairs = [0; 6];
    all.iter().for_each(|request| pairs[request.model * 2 + request.key.unwrap()] += 1);
    // Four standard deviations around a sixth of 6000.
    assert!(pairs.iter().all(|count| (884..1116).contains(count)), "{pairs:?}");
    assert!(
        all.windows(4).any(|four| four.iter().all(|request| request.model == four[0].model)),
        "{pairs:?}"
    );
    assert!((0..50).all(|index| load().request(index).key.is_none()));
}

#[test]
fn an_impossible_load_is_rejected() {
    let refused = |load: LoadSpec, endpoint| load.check(endpoint).err().map(|error| error.to_string());
    assert_eq!(refused(load(), Endpoint::Completions), None);
    assert!(
        refused(load(), Endpoint::Chat)
            .is_some_and(|error| error.contains("chat endpoint requires text prompts"))
    );
    for prompts in [PromptSource::Words, texts()] {
        assert_eq!(refused(LoadSpec { prompts, ..load() }, Endpoint::Chat), None);
    }
    let cannot_be = [
        LoadSpec { requests: 0, ..load() },
        LoadSpec { prompts: PromptSource::Ids { vocab: 0 }, ..load() },
        LoadSpec { prompts: PromptSource::Texts([].into()), ..load() },
        LoadSpec { trace: Some([].into()), ..load() },
        LoadSpec { shared_prefix: 1, prefix_groups: 0, ..load() },
        LoadSpec { temperature: f32::NAN, ..load() },
        LoadSpec { temperature: -1.0, ..load() },
        LoadSpec { hangup_share: 1.5, ..load() },
        LoadSpec { hangup_share: 0.1, hangup_after: 0, ..load() },
        LoadSpec { slow_share: f64::NAN, ..load() },
        LoadSpec { slow_share: 0.1, slow_rate: 0, ..load() },
        LoadSpec { models: 0, ..load() },
    ];
    for load in cannot_be {
        assert!(load.check(Endpoint::Completions).is_err(), "{load:?}");
    }
}
