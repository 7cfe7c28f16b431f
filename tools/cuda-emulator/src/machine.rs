//! A device without the driver's interface: memory, modules and launches. The driver is built on it, and
//! tests of instructions use it as it is.

use crate::coverage::text_hash;
use crate::exec::{self, Config, Request};
use crate::findings::{Finding, Kind};
use crate::memory::GlobalMemory;
use crate::program::{self, Addresses, Placement, Program};
use crate::ptx::{self, PtxError, Value};
use std::sync::Arc;

/// A module that was loaded.
#[derive(Clone, Debug)]
pub struct Module {
    pub(crate) program: Arc<Program>,
    /// Addresses and sizes of its variables.
    pub(crate) variables: Arc<Vec<(String, u64, u64)>>,
    /// Its allocation, if it has variables.
    pub(crate) base: Option<u64>,
}

/// Dimensions and shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// CTAs in each dimension.
    pub grid: [u32; 3],
    /// Threads of a CTA in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u32,
    /// Whether all CTAs run at once, so that they can wait for one another.
    pub cooperative: bool,
}

impl Shape {
    /// So many CTAs of so many threads.
    pub fn linear(ctas: u32, threads: u32) -> Shape {
        Shape { grid: [ctas, 1, 1], block: [threads, 1, 1], dynamic_shared: 0, cooperative: false }
    }
}

/// The outcome of a launch.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Everything that went wrong.
    pub findings: Vec<Finding>,
    /// Text that the kernel printed.
    pub printed: String,
    /// Instructions that warps made.
    pub instructions: u64,
    /// Instructions that lanes made: those of warps times their active lanes.
    pub lane_operations: u64,
}

/// A device.
#[derive(Debug)]
pub struct Machine {
    pub(crate) memory: GlobalMemory,
    pub(crate) config: Config,
    next_epoch: u32,
    launches: u64,
}

impl Machine {
    /// A device of an architecture (`80` for compute capability 8.0) with a seed for the order of warps.
    pub fn new(arch: u32, seed: u64) -> Machine {
        Machine::with(
            0,
            1 << 30,
            Config { arch, seed, instructions: 1 << 34, global_races: true, corners: false, coverage: None },
        )
    }

    /// Lets launches fail that make more instructions of warps than these.
    pub fn limit_instructions(&mut self, most: u64) {
        self.config.instructions = most;
    }

    /// The device with an index, so much memory, and settings.
    pub(crate) fn with(index: usize, bytes: u64, config: Config) -> Machine {
        Machine { memory: GlobalMemory::new(index, bytes), config, next_epoch: 1, launches: 0 }
    }

    /// Allocates `bytes` that nobody has written.
    ///
    /// # Panics
    /// If the memory is full.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        self.memory.alloc(bytes as u64).expect("the memory of the device is full")
    }

    /// Allocates the bytes of `data`.
    ///
    /// # Panics
    /// If the memory is full.
    pub fn upload(&mut self, data: &[u8]) -> u64 {
        let address = self.alloc(data.len().max(1));
        self.write(address, data).expect("it was allocated");
        address
    }

    /// Writes `data` at `address`.
    ///
    /// # Errors
    /// The finding of an address that is not allocated.
    pub fn write(&mut self, address: u64, data: &[u8]) -> Result<(), Finding> {
        let (region, at) =
            self.memory.at(address, data.len() as u64).map_err(|it| host_fault(it, address))?;
        region.data[at..at + data.len()].copy_from_slice(data);
        region.mark_range(at, data.len());
        Ok(())
    }

    /// Writes zeros to a large allocation as a whole; tells whether `bytes` at `address` are one.
    pub(crate) fn zero_sparsely(&mut self, address: u64, bytes: usize) -> bool {
        self.memory.at(address, bytes as u64).is_ok_and(|(region, at)| at == 0 && region.zero_sparsely(bytes))
    }

    /// Reads bytes at `address`, written or not.
    ///
    /// # Errors
    /// The finding of an address that is not allocated.
    pub fn read(&mut self, address: u64, bytes: usize) -> Result<Vec<u8>, Finding> {
        let (region, at) = self.memory.at(address, bytes as u64).map_err(|it| host_fault(it, address))?;
        Ok(region.data[at..at + bytes].to_vec())
    }

    /// Offsets of bytes at `address` that were never written.
    pub(crate) fn unwritten(&mut self, address: u64, bytes: usize) -> Vec<usize> {
        let Ok((region, at)) = self.memory.at(address, bytes as u64) else { return Vec::new() };
        (0..bytes).filter(|offset| !region.byte_written(at + offset)).collect()
    }

    /// The offset of the first byte of a range that was never written.
    pub(crate) fn first_unwritten(&mut self, address: u64, bytes: usize) -> Option<usize> {
        let (region, at) = self.memory.at(address, bytes as u64).ok()?;
        region.first_unwritten(at, bytes)
    }

    /// Lets bytes count as never written.
    pub(crate) fn unwrite(&mut self, address: u64, offsets: &[usize]) {
        for offset in offsets {
            if let Ok((region, at)) = self.memory.at(address + *offset as u64, 1) {
                region.set_range(at, 1, false);
            }
        }
    }

    /// Frees an allocation; tells whether `address` is one.
    pub fn free(&mut self, address: u64) -> bool {
        self.memory.free(address)
    }

    /// Loads a module.
    ///
    /// # Errors
    /// Fails with the line of what is malformed, or of an unknown instruction or directive.
    pub fn load(&mut self, text: &str) -> Result<Module, PtxError> {
        let tree = ptx::parse(text)?;
        let placement = Placement::of(&tree);
        let base = match placement.bytes {
            0 => None,
            bytes => Some(
                self.memory
                    .alloc_module(bytes, placement.constant)
                    .ok_or_else(|| PtxError::new(0, "no memory for the module's variables"))?,
            ),
        };
        let first = base.unwrap_or(0);
        let addresses: Addresses =
            placement.offsets.iter().map(|(name, at)| (name.clone(), first + at)).collect();
        let mut program = program::lower(&tree, &addresses)?;
        if self.config.coverage.is_some() {
            program.text_hash = text_hash(text);
        }
        let mut variables = Vec::new();
        for variable in program::device_variables(&tree) {
            let Some(at) = addresses.get(&variable.name).copied() else { continue };
            let bytes = variable.bytes.unwrap_or(0);
            let data = self.initial(variable, &addresses, &program);
            // Variables without an initializer are zeros (PTX ISA, 5.4.4).
            let _ = self.write(at, &data);
            variables.push((variable.name.clone(), at, u64::from(bytes)));
        }
        Ok(Module { program: Arc::new(program), variables: Arc::new(variables), base })
    }

    fn initial(&self, variable: &ptx::Variable, addresses: &Addresses, program: &Program) -> Vec<u8> {
        let size = variable.ty.bytes() as usize;
        let mut data = vec![0; variable.bytes.unwrap_or(0) as usize];
        for (element, value) in data.chunks_mut(size).zip(&variable.init) {
            let bits = match value {
                Value::Bits(bits) => *bits,
                Value::Address { name, offset, .. } => {
                    let function = program.functions.iter().position(|it| it.name == *name);
                    let function = function.map(|at| program::FUNCTION_WINDOW + at as u64);
                    addresses.get(name).copied().or(function).unwrap_or(0).wrapping_add_signed(*offset)
                }
            };
            element.copy_from_slice(&bits.to_le_bytes()[..element.len()]);
        }
        data
    }

    /// Runs a kernel of a module with the bytes of its parameters, laid out as its declaration says.
    ///
    /// # Errors
    /// A kernel that the module does not have, or too few bytes.
    pub fn launch(
        &mut self,
        module: &Module,
        kernel: &str,
        shape: Shape,
        params: &[u8],
    ) -> Result<Report, String> {
        let index = module.program.kernel(kernel).ok_or_else(|| format!("there is no kernel '{kernel}'"))?;
        let needed = module.program.functions[index].param_bytes() as usize;
        if params.len() < needed {
            return Err(format!("{} bytes of parameters; '{kernel}' has {needed}", params.len()));
        }
        Ok(self.run(&module.program, index, shape, params))
    }

    /// Runs a kernel by its index.
    pub(crate) fn run(&mut self, program: &Program, kernel: usize, shape: Shape, params: &[u8]) -> Report {
        self.launches += 1;
        let seed = self.config.seed.wrapping_add(self.launches.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let config = Config { seed, ..self.config.clone() };
        let request = Request {
            program,
            kernel,
            grid: shape.grid,
            block: shape.block,
            dynamic_shared: shape.dynamic_shared,
            params,
            cooperative: shape.cooperative,
            first_epoch: self.next_epoch,
        };
        let outcome = exec::launch(&request, &mut self.memory, &config);
        self.next_epoch = outcome.next_epoch;
        self.memory.trim_records();
        Report {
            findings: outcome.findings,
            printed: outcome.printed,
            instructions: outcome.instructions,
            lane_operations: outcome.lane_operations,
        }
    }
}

/// A finding of a copy by the host.
fn host_fault(fault: crate::memory::Fault, address: u64) -> Finding {
    Finding {
        kind: fault.kind,
        kernel: String::new(),
        line: 0,
        cta: [0; 3],
        thread: 0,
        address,
        what: format!("a copy by the host: {}", fault.what),
        count: 1,
    }
}

/// Lays out values as a kernel's parameters are: each at a multiple of its size.
#[derive(Clone, Debug, Default)]
pub struct Params {
    bytes: Vec<u8>,
}

impl Params {
    /// No parameters yet.
    pub fn new() -> Params {
        Params::default()
    }

    fn add(mut self, value: &[u8]) -> Params {
        self.bytes.resize(self.bytes.len().next_multiple_of(value.len()), 0);
        self.bytes.extend(value);
        self
    }

    /// Adds a pointer or another value of 64 bits.
    pub fn u64(self, value: u64) -> Params {
        self.add(&value.to_le_bytes())
    }

    /// Adds a value of 32 bits.
    pub fn u32(self, value: u32) -> Params {
        self.add(&value.to_le_bytes())
    }

    /// Adds a float.
    pub fn f32(self, value: f32) -> Params {
        self.add(&value.to_le_bytes())
    }

    /// The bytes of all parameters.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Findings of some kinds only.
pub fn kinds(findings: &[Finding]) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = findings.iter().map(|it| it.kind).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}
