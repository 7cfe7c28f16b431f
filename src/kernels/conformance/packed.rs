//! Tests that a weight can be refilled with the packed bytes of another one.

use super::inputs::*;
use super::rig::*;
use mainstem_kernels::backend::{Backend, PackedLayout, Weight};
use mainstem_kernels::quant::QuantType;

/// Rows of the GEMMs.
const ROWS: usize = 3;

/// Tests every weight format: a refilled weight gives the bits of the weight that the packed bytes were
/// downloaded from, nothing is allocated for it, and bytes of another layout or length are refused.
pub fn packed_weights<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    rig.begin_rows(ROWS);
    for ty in QuantType::all() {
        // An incomplete panel, several panels, and a single number.
        for (n, k) in [(7, 300), (35, 64), (1, 1)] {
            assert_refill(&mut rig, ty, n, round_to_blocks(ty, k));
        }
    }
}

fn assert_refill<B: Backend>(rig: &mut Rig<B>, ty: QuantType, n: usize, k: usize) {
    // The second matrix is the first one without its first row, because some formats cannot be written.
    let quantized = quantize_values(ty, &noise(31, (n + 1) * k));
    let row = quantized.len() / (n + 1);
    let first = rig.quantized_weight(ty, n, k, &quantized[..n * row]);
    let mut second = rig.quantized_weight(ty, n, k, &quantized[row..]);
    let layout = first.packed_layout(rig.backend.sizes());
    assert_eq!((layout.ty, layout.n, layout.k), (ty, n, k));
    let packed = download(rig, &first, &layout);
    let (expected, before) = (product(rig, &first), product(rig, &second));
    assert_ne!(expected, before, "two matrices of {layout}");

    let allocated = rig.backend.allocated_bytes();
    let foreign = [
        PackedLayout { arrangement: "another", ..layout },
        PackedLayout { version: layout.version + 1, ..layout },
        PackedLayout { n: n + 1, ..layout },
        PackedLayout { k: k + 1, ..layout },
    ];
    for foreign in foreign {
        let refused = rig.backend.refill_weight(&mut second, &foreign, &packed);
        assert!(refused.is_err(), "{layout} was refilled with {foreign}");
    }
    for wrong in [&packed[1..], &[&packed[..], &[0]].concat(), &[]] {
        let refused = rig.backend.refill_weight(&mut second, &layout, wrong);
        assert!(refused.is_err(), "{layout} was refilled with {} bytes", wrong.len());
    }
    assert_eq!(product(rig, &second), before, "{layout}: refused bytes were written");

    rig.backend.refill_weight(&mut second, &layout, &packed).expect("the layout is the weight's own");
    assert_eq!(rig.backend.allocated_bytes(), allocated, "{layout}: refilling allocates");
    assert_eq!(product(rig, &second), expected, "{layout}: a product after refilling");
    assert!(download(rig, &second, &layout) == packed, "{layout}: bytes after refilling");
}

/// Returns the packed bytes of a weight.
fn download<B: Backend>(rig: &mut Rig<B>, w: &Weight<B::Buf>, layout: &PackedLayout) -> Vec<u8> {
    let mut packed = vec![0; layout.bytes];
    rig.backend.download(&w.buf, 0, &mut packed);
    packed
}

/// Returns the bits of x · wᵀ, for x (rows, k).
fn product<B: Backend>(rig: &mut Rig<B>, w: &Weight<B::Buf>) -> Vec<u32> {
    let (x, mut y) = (rig.input(&noise(32, ROWS * w.k)), rig.output(ROWS * w.n));
    rig.backend.matmul(ROWS, w, None, &x, &mut y);
    let values = rig.read(&y, ROWS * w.n, format_args!("a product with {} x {} of {}", w.n, w.k, w.ty));
    values.into_iter().map(f32::to_bits).collect()
}
