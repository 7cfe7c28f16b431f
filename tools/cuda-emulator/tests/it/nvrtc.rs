//! PTX as NVRTC makes it, of three versions.

use cuda::{Machine, Params, Shape};

const TEXTS: [(&str, &str); 3] = [
    ("12.0", include_str!("../fixtures/coverage.12.0.ptx")),
    ("12.9", include_str!("../fixtures/coverage.12.9.ptx")),
    ("13.5", include_str!("../fixtures/coverage.13.5.ptx")),
];

#[test]
fn modules_of_all_versions_load() {
    for (version, text) in TEXTS {
        if let Err(error) = Machine::new(80, 1).load(text) {
            panic!("NVRTC {version}: {error}");
        }
    }
}

/// `k4` branches by a table, keeps a local array, calls by pointer, and reads special registers.
#[test]
fn compiled_kernels_run() {
    for (version, text) in TEXTS {
        let mut machine = Machine::new(80, 1);
        let module = machine.load(text).expect("it loads");
        let words: Vec<u32> = (0..64).map(|it| it + 1).collect();
        let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
        let to = machine.upload(&bytes);
        let params = Params::new().u64(to).u32(2);
        let shape = Shape { dynamic_shared: 64, ..Shape::linear(1, 1) };
        let report = machine.launch(&module, "k4", shape, params.bytes()).expect("it is there");
        // `dyn[n + 1]` was never written; the rest is sound.
        let kinds = cuda::kinds(&report.findings);
        assert_eq!(kinds, [cuda::Kind::Uninitialised], "NVRTC {version}: {:?}", report.findings);
        let word = |at: usize, machine: &mut Machine| {
            let bytes = machine.read(to + 4 * at as u64, 4).expect("it is there");
            u32::from_le_bytes(bytes.try_into().expect("4 bytes"))
        };
        // Case 2 of the switch: o[3] = 4, r = o[8] / 7 = 1. Then o[r] = loc[6] + r; loc[6] is o[6] * 6.
        assert_eq!(word(1, &mut machine), 43, "NVRTC {version}");
        assert_eq!(word(3, &mut machine), 4, "NVRTC {version}");
        // fib(3), through a table of functions.
        assert_eq!(word(4, &mut machine), 2, "NVRTC {version}");
        // %lanemask_lt of lane 0, %warpid, and the size of dynamic shared memory.
        assert_eq!([7, 8, 9].map(|at| word(at, &mut machine)), [0, 0, 64], "NVRTC {version}");
    }
}
