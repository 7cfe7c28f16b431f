use super::*;
use crate::model::shard::Shard;
use crate::model::{ModelRef, ModelSource, tensors};
use std::path::Path;

fn of_file(path: &str) -> (ModelSource, ModelShape) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let source = ModelSource::open(&ModelRef::Path(path), None).unwrap();
    let stored = |piece: &TensorSlice| source.checkpoint.tensor(&piece.name).unwrap().quant_type().unwrap();
    let shape = ModelShape::from_spec("it", &source.spec, stored, QuantType::F16);
    (source, shape)
}

/// Each stored value belongs to one layer, the embedding or the head, except for the final norm.
#[test]
fn a_models_parts_make_up_its_files() {
    for fixture in ["gqa", "biased", "mha", "tied"] {
        let (source, shape) = of_file(&format!("tests/fixtures/{fixture}"));
        let files: usize = tensors::required_tensors(&source.spec)
            .into_iter()
            .map(|piece| source.checkpoint.tensor(&piece.name).unwrap().bytes_len())
            .sum();
        let (stored, files) = (shape.stored(), files as f64);
        assert!((stored - files).abs() / files < 0.02, "{fixture}: {stored} of {files}");
        assert_eq!(shape.layer_costs().len(), source.spec.layers());
    }
}

/// A device with both ends of a model holds their common table once; two devices with one end each hold it
/// twice.
#[test]
fn a_shared_table_is_twice_in_the_units_that_have_it() {
    let (source, shape) = of_file("tests/fixtures/tied");
    let table = &source.spec.last_stack().embedding.as_ref().unwrap().table;
    let table = source.checkpoint.tensor(&table.name).unwrap().bytes_len() as f64;
    let layers = shape.layers();
    assert_eq!(shape.duplicate_bytes(&(0..layers)), table);
    assert_eq!([0..layers - 1, 1..layers].map(|part| shape.duplicate_bytes(&part)), [0.0, 0.0]);
    assert!(of_file("tests/fixtures/gqa").1.shared_tables.is_empty());
}

/// The model card gives 41.3 billion parameters.
#[test]
fn the_papers_model_has_its_size() {
    let shape = ModelShape::uniform("falcon-40b", &FALCON_40B);
    assert!((shape.stored() / 2.0 / 1e9 - 41.3).abs() < 0.1, "{}", shape.stored());
    assert_eq!(shape.layers(), 60);
}

/// A layer's heads and cache match those of the shard for any shares: one KV head is replicated on all ranks
/// with query heads of it, and three ranks cannot have a third of four heads each.
#[test]
fn ranks_have_the_heads_of_their_shards() {
    for (fixture, shares) in [
        ("mqa", &[1, 1][..]),
        ("gqa", &[1, 1, 1, 1]),
        ("gqa", &[1, 1, 1]),
        ("gqa", &[1, 1, 4]),
        ("gqa", &[3, 1]),
        ("mha", &[1, 1, 1]),
        ("mha", &[1, 5]),
    ] {
        let (source, shape) = of_file(&format!("tests/fixtures/{fixture}"));
        let layer = shape.decoder.unwrap().layers[0];
        for (rank, own) in layer.by_rank(shares).into_iter().enumerate() {
            let shard = Shard { shares: shares.to_vec(), rank, ..Shard::whole(&source.spec) };
            let stored =
                |piece: &TensorSlice| source.checkpoint.tensor(&piece.name).unwrap().quant_type().unwrap();
            let cut =
                ModelShape::from_spec("it", &source.shard_spec(&shard).unwrap(), stored, QuantType::F16);
            let cut = cut.decoder.unwrap().layers[0].total();
            let what = format!("{fixture} by {shares:?}, {rank}: {own:?} {cut:?}");
            assert_eq!((own.kv, own.macs_per_position), (cut.kv, cut.macs_per_position), "{what}");
            // Except for norms, which are replicated.
            assert!((own.stored / cut.stored - 1.0).abs() < 0.05, "{what}");
        }
    }
}

#[test]
fn a_row_reads_the_experts_it_is_sent_to_and_many_rows_all() {
    let part = ResourceCost {
        stored: 100.0,
        read: 20.0,
        read_per_row: 10.0,
        read_max: 100.0,
        ..ResourceCost::default()
    };
    assert_eq!([1.0, 2.0, 80.0].map(|rows| part.bytes_read(rows)), [30.0, 40.0, 100.0]);
    // An embedding in the same stage is looked up and not streamed.
    let stage = lookup_cost(matrix_cost(QuantType::F32, 100)) + part;
    assert_eq!([1.0, 80.0].map(|rows| stage.bytes_read(rows)), [30.0, 100.0]);
    assert_eq!(stage.stored, 500.0);
}
