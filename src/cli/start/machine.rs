//! The rates of this machine, for placements: measured with the devices, kernels and readers of the engine,
//! and kept in the cache folder.
//!
//! Invariant: what is kept belongs to the same CPU, instruction set, threads, program version and disk.

use super::cache_folder::cache_folder;
use super::devices::cpu_backend;
use super::measure::{self, limits, min_seconds};
use super::overhead;
use super::tiers::stores_folder;
use crate::actors::engine::available_memory;
use crate::config::{Config, DeviceConfig, DeviceKind, DeviceName};
use crate::model::offload::DiskSpeed;
use crate::planner::placement::{AttentionRates, AttentionShape, DiskRates, MachineRates, RowCurve};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::cpu::{CpuBackend, RooflineMeter};
use mainstem_kernels::reference::Reference;
use mainstem_kernels::{
    self as kernels, Backend, DeviceSizes as _, KvLayout, KvTable, Mask, QuantType, Span, SpanModel,
    SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, TableUpdate,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::btree_map::Entry;
use std::fs;
use std::path::{Path, PathBuf};
use tracing::warn;

/// Numbers of rows whose GEMMs are measured.
const ROWS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// Width of the square matrices: a multiple of the blocks of all formats, and about that of layers.
const WIDTH: usize = 2048;

/// Bytes of all matrices of a GEMM's measurement, more than caches hold: each run uses another matrix.
const MATRIX_BYTES: usize = 96 << 20;

/// Bytes of memory whose reading is measured, at most and at least.
const READ_BYTES: [usize; 2] = [512 << 20, 64 << 20];

/// Sequences that decode at once in the measurement of attention, and rows of a prompt, each with a context
/// of so many positions.
const SEQUENCES: usize = 8;
const PROMPT_ROWS: usize = 64;
const CONTEXT: usize = 512;

/// Positions of a page in the measurement of attention.
const PAGE: usize = 32;

/// The rates that a plan needs.
#[derive(Clone, Debug, Default)]
pub struct RateNeeds {
    pub formats: Vec<QuantType>,
    pub attention: Vec<AttentionShape>,
    /// Whether weights may be read from the disk.
    pub disk: bool,
}

/// The machine that rates belong to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct MachineKey {
    cpu: String,
    /// Kind, instruction set and threads of the device.
    device: String,
    /// Precision of activations.
    activations: String,
    program: String,
    /// Number of the disk's device; `None` if it is not known.
    disk: Option<u64>,
}

/// A file of rates.
#[derive(Serialize, Deserialize)]
struct RatesFile {
    key: MachineKey,
    rates: MachineRates,
}

/// The rates of one of the configured devices that are kept, and their file.
pub struct KnownRates {
    pub rates: MachineRates,
    key: MachineKey,
    file: PathBuf,
}

impl KnownRates {
    /// Reads the rates that are kept. Fails as [`planned_devices`] does.
    pub fn open(config: &Config) -> Result<KnownRates> {
        let key = MachineKey::new(config)?;
        let json = serde_json::to_vec(&key).context("the machine's key is not JSON")?;
        let digest: String = Sha256::digest(json).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let file = cache_folder()?.join("machine").join(format!("{digest}.json"));
        let known = fs::read(&file).ok().and_then(|text| serde_json::from_slice::<RatesFile>(&text).ok());
        let rates = known.filter(|known| known.key == key).map(|known| known.rates).unwrap_or_default();
        Ok(KnownRates { rates, key, file })
    }

    /// Returns whether nothing has to be measured for `needs`.
    pub fn have(&self, needs: &RateNeeds) -> bool {
        let MachineRates { memory, gemms, attention, disk, .. } = &self.rates;
        *memory > 0.0
            && needs.formats.iter().all(|ty| gemms.contains_key(ty.name()))
            && needs.attention.iter().all(|shape| attention.contains_key(&shape.name()))
            && (disk.is_some() || !needs.disk)
    }

    /// Measures what `needs` names and is not known, and keeps it. Takes a few seconds.
    pub fn complete(&mut self, config: &Config, needs: &RateNeeds) -> Result<()> {
        if self.have(needs) {
            return Ok(());
        }
        let (device, kind) = (&config.device, planned_devices(&config.device)?);
        if self.rates.memory <= 0.0 {
            self.rates.memory = memory_rate(device, kind)?;
            self.rates.operation = measure::operation_seconds(device, DeviceName { kind, number: 0 })?;
            [self.rates.step, self.rates.token] = overhead::measure()?;
        }
        for ty in &needs.formats {
            if let Entry::Vacant(unknown) = self.rates.gemms.entry(ty.name().to_owned()) {
                unknown.insert(gemm_curve(device, kind, *ty)?);
            }
        }
        for shape in &needs.attention {
            if let Entry::Vacant(unknown) = self.rates.attention.entry(shape.name()) {
                unknown.insert(attention_rates(device, kind, shape)?);
            }
        }
        if needs.disk && self.rates.disk.is_none() {
            let DiskSpeed { read, write, pages } = DiskSpeed::measure(&stores_folder(&config.tiers)?)?;
            self.rates.disk = Some(DiskRates { read, write, pages });
        }
        if let Err(error) = self.save() {
            warn!(file = %self.file.display(), "cannot keep the machine's rates: {error:#}");
        }
        Ok(())
    }

    /// Forgets the rates, so that they are measured again.
    pub fn forget(&mut self) {
        self.rates = MachineRates::default();
    }

    fn save(&self) -> Result<()> {
        let folder = self.file.parent().context("the file has no folder")?;
        fs::create_dir_all(folder)?;
        let file = RatesFile { key: self.key.clone(), rates: self.rates.clone() };
        // Renamed, so that nobody reads a part.
        let unfinished = self.file.with_extension(format!("{}.tmp", std::process::id()));
        fs::write(&unfinished, serde_json::to_vec_pretty(&file)?)?;
        Ok(fs::rename(&unfinished, &self.file)?)
    }
}

impl MachineKey {
    fn new(config: &Config) -> Result<MachineKey> {
        let device = match planned_devices(&config.device)? {
            DeviceKind::Cpu => super::devices::cpu_sizes(&config.device)?.describe(),
            _ => Reference::new().describe(),
        };
        Ok(MachineKey {
            cpu: cpu_name(),
            device,
            activations: format!("{:?}", config.device.activation_precision),
            program: env!("CARGO_PKG_VERSION").to_owned()
                + if cfg!(debug_assertions) { " (debug)" } else { "" },
            disk: disk_number(&stores_folder(&config.tiers)?),
        })
    }
}

/// Returns the kind of the configured devices. Fails if a plan cannot be made for them: if they are of
/// several kinds or compute nothing, or if they divide the layers of a stage.
pub fn planned_devices(config: &DeviceConfig) -> Result<DeviceKind> {
    let mut kinds = config.devices().map(|device| device.kind);
    let first = kinds.next().context("device.groups: there are no devices")?;
    match first {
        DeviceKind::Cpu | DeviceKind::Reference => {}
        DeviceKind::Cuda => bail!("device.groups: a placement cannot be planned for GPUs"),
        DeviceKind::Fake { .. } => bail!("device.kind: a placement cannot be planned for fake devices"),
    }
    ensure!(
        kinds.all(|kind| kind == first),
        "device.groups: a placement is planned for devices of one kind only"
    );
    ensure!(
        config.groups.iter().all(|ranks| ranks.len() == 1),
        "device.groups: a placement cannot be planned for ranks that share the layers of a stage; list the \
         devices as stages, such as 0;1"
    );
    Ok(first)
}

/// Returns the CPU's name, or the architecture if the system does not say.
pub fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// Returns the number of the device that a folder, or the nearest one above it, lies on.
fn disk_number(folder: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    let found = folder.ancestors().find_map(|folder| folder.metadata().ok());
    found.map(|found| found.dev())
}

/// Measures the bytes of memory that the device reads per second.
fn memory_rate(config: &DeviceConfig, kind: DeviceKind) -> Result<f64> {
    match kind {
        DeviceKind::Cpu => {
            let [most, least] = READ_BYTES;
            let meter = RooflineMeter::new((available_memory() / 8).clamp(least, most))?;
            let mut cpu = cpu_backend(0, config)?;
            Ok((0..3).map(|_| meter.measure(&mut cpu).read).fold(0.0, f64::max))
        }
        _ => measure::bandwidth(config, DeviceName { kind, number: 0 }),
    }
}

/// Measures GEMMs with weights of a format. Returns the seconds per element of the weight.
fn gemm_curve(config: &DeviceConfig, kind: DeviceKind, ty: QuantType) -> Result<RowCurve> {
    let measured = match kind {
        DeviceKind::Cpu => gemms_on::<CpuBackend>(cpu_backend(0, config)?, ty),
        _ => gemms_on(Reference::new(), ty),
    };
    measured.with_context(|| format!("measuring GEMMs with weights in {}", ty.name()))
}

fn gemms_on<B: Backend>(mut backend: B, ty: QuantType) -> Result<RowCurve> {
    let bytes = ty.bytes(WIDTH).context("rows are not whole blocks")?.saturating_mul(WIDTH);
    let count = (MATRIX_BYTES.min(available_memory() / 8) / bytes).max(1);
    let zeros = vec![0; bytes];
    let weights = (0..count).map(|_| backend.upload_weight(ty, WIDTH, WIDTH, &zeros));
    let weights = weights.collect::<Result<Vec<_>, _>>()?;
    let rows_max = ROWS[ROWS.len() - 1];
    let x = backend.alloc(rows_max * WIDTH * size_of::<f32>())?;
    let mut y = backend.alloc(rows_max * WIDTH * size_of::<f32>())?;
    backend.prepare(&limits(1, rows_max, 1))?;
    let mut next = 0;
    let point = |rows: usize| {
        let seconds = min_seconds(|| {
            next = (next + 1) % weights.len();
            backend.matmul(rows, &weights[next], None, &x, &mut y);
        });
        (rows as f64, seconds / (WIDTH * WIDTH) as f64)
    };
    Ok(RowCurve::new(ROWS.into_iter().map(point).collect()))
}

/// Measures attention. Returns the seconds per row and position.
fn attention_rates(
    config: &DeviceConfig,
    kind: DeviceKind,
    shape: &AttentionShape,
) -> Result<AttentionRates> {
    let measured = match kind {
        DeviceKind::Cpu => attention_on::<CpuBackend>(cpu_backend(0, config)?, shape),
        _ => attention_on(Reference::new(), shape),
    };
    measured.with_context(|| format!("measuring attention over {}", shape.name()))
}

fn attention_on<B: Backend>(mut backend: B, shape: &AttentionShape) -> Result<AttentionRates> {
    let AttentionShape { ty, heads, kv_heads, k_dim, v_dim, v_in_k } = *shape;
    let pages = CONTEXT / PAGE;
    let layout =
        KvLayout { ty, pages: 1 + SEQUENCES * pages, page_positions: PAGE, kv_heads, k_dim, v_dim, v_in_k };
    let cache = backend.alloc_kv(layout)?;
    let q = backend.alloc(PROMPT_ROWS * heads * k_dim * size_of::<f32>())?;
    let mut out = backend.alloc(PROMPT_ROWS * heads * v_dim * size_of::<f32>())?;
    backend.prepare(&limits(SEQUENCES, PROMPT_ROWS, CONTEXT))?;
    let page = |slot: u32, index: u32| TableUpdate {
        slot,
        table: KvTable::Own,
        index,
        page: 1 + slot * pages as u32 + index,
    };
    let entries =
        (0..SEQUENCES as u32).flat_map(|slot| (0..pages as u32).map(move |index| page(slot, index)));
    let mask = Mask::Causal { window: None };
    let attention = kernels::AttentionShape::plain(heads, 1.0, mask, KvTable::Own);
    let mut measure = |batch: &StepBatch| {
        backend.begin_step(batch);
        let seconds = min_seconds(|| backend.attention(&attention, &q, &cache, &mut out));
        backend.end_step();
        seconds
    };
    let decode = StepBatch {
        table_updates: entries.collect(),
        spans: (0..SEQUENCES as u32).map(|slot| last_rows(slot, slot, 1)).collect(),
        tokens: vec![0; SEQUENCES],
        ..StepBatch::default()
    };
    let prompt = StepBatch {
        step: 1,
        spans: vec![last_rows(0, 0, PROMPT_ROWS)],
        tokens: vec![0; PROMPT_ROWS],
        ..StepBatch::default()
    };
    let seen = (CONTEXT - PROMPT_ROWS / 2) * PROMPT_ROWS;
    Ok(AttentionRates {
        decode: measure(&decode) / (SEQUENCES * CONTEXT) as f64,
        prompt: measure(&prompt) / seen as f64,
    })
}

/// Returns a span of the last rows of a sequence, whose tokens begin at index `at`.
fn last_rows(slot: u32, at: u32, rows: usize) -> Span {
    Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot,
        start: (CONTEXT - rows) as u32,
        tokens: SpanTokens::Given { at, len: rows as u32 },
        table: SpanTable::Own,
        reserved: CONTEXT as u32,
        encoder_len: 0,
        output: SpanOutput::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;
    use crate::testing::Scratch;

    fn config(settings: &[(&'static str, &str)]) -> Config {
        let mut flags = Overrides::default();
        settings.iter().for_each(|(key, value)| flags.set(key, Some(*value)));
        Config::load(None, flags).unwrap()
    }

    fn with_threads(threads: u32) -> Config {
        let mut flags = Overrides::default();
        flags.set("device.threads", Some(threads));
        Config::load(None, flags).unwrap()
    }

    #[test]
    fn a_placement_is_for_devices_of_one_kind_that_compute() {
        let of = |settings: &[(&'static str, &str)]| {
            planned_devices(&config(settings).device).map_err(|error| error.to_string())
        };
        assert_eq!(of(&[]), Ok(DeviceKind::Cpu));
        assert_eq!(of(&[("device.groups", "0;1")]), Ok(DeviceKind::Cpu));
        let ranks = of(&[("device.groups", "0;1|2")]).unwrap_err();
        assert!(ranks.contains("device.groups: ") && ranks.contains("ranks"), "{ranks}");
        assert!(of(&[("device.groups", "0;reference:0")]).unwrap_err().contains("one kind only"));
        assert!(of(&[("device.kind", "fake")]).unwrap_err().contains("fake"));
        assert!(of(&[("device.kind", "cuda")]).unwrap_err().contains("GPUs"));
    }

    /// Attention of every cache type, and GEMMs of a blocked format, run with the batches that are made here.
    #[test]
    fn everything_that_a_plan_needs_can_be_measured() {
        let config = with_threads(1);
        for ty in QuantType::kv_cache_types() {
            let shape = AttentionShape { ty, heads: 4, kv_heads: 2, k_dim: 32, v_dim: 32, v_in_k: false };
            let rates = attention_rates(&config.device, DeviceKind::Cpu, &shape).unwrap();
            assert!(rates.decode > 0.0 && rates.prompt > 0.0, "{}: {rates:?}", ty.name());
        }
    }

    #[test]
    fn rates_of_another_machine_are_not_used() {
        let folder = Scratch::new();
        let file = folder.path().join("rates.json");
        let key = MachineKey::new(&config(&[])).unwrap();
        let rates = MachineRates {
            memory: 2.0,
            gemms: [("f16".to_owned(), RowCurve::new(vec![(1.0, 0.1), (512.0, 3.7)]))].into(),
            ..MachineRates::default()
        };
        let known = KnownRates { rates: rates.clone(), key: key.clone(), file: file.clone() };
        known.save().unwrap();
        let read: RatesFile = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!((read.key, read.rates), (key.clone(), rates));
        let needs = |disk| RateNeeds { formats: vec![QuantType::F16], attention: Vec::new(), disk };
        assert!(known.have(&needs(false)) && !known.have(&needs(true)));
        assert_ne!(MachineKey::new(&with_threads(1 + config(&[]).device.threads as u32)).unwrap(), key);
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    }
}
