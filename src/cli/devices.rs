//! `mainstem devices`: lists what this machine can compute with.
//!
//! Invariant: it succeeds on every machine; for what is missing, there is a line that says so.

use super::{print, start, to_json};
use crate::actors::engine::available_memory;
use crate::config::{Config, DeviceConfig, Overrides};
use anyhow::Result;
use clap::{Args, ValueHint};
use indicatif::BinaryBytes;
use mainstem_kernels::cuda::{Architecture, Driver, Gpu, Nvrtc};
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

/// List the devices of this machine.
///
/// Shows the CPU, and of CUDA the GPUs, the driver, and NVRTC, which compiles kernels.
#[derive(Args)]
pub struct DevicesArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// NVRTC library, or a folder with it; by default searched in the system and in Python's packages.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    nvrtc: Option<String>,
    /// Configuration file.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

/// The devices of a machine.
#[derive(Debug, Serialize)]
struct Devices {
    cpu: Cpu,
    cuda: Cuda,
}

#[derive(Debug, Serialize)]
struct Cpu {
    name: String,
    /// Instruction set and threads of the first device.
    device: String,
    available_memory: usize,
}

/// The parts of CUDA that were found, and for those that were not, the reasons.
#[derive(Debug, Default, Serialize)]
struct Cuda {
    /// Newest version of CUDA that the driver can run.
    driver: Option<String>,
    nvrtc: Option<Compiler>,
    gpus: Vec<GpuRecord>,
    /// GPUs whose properties the driver cannot tell.
    broken: Vec<BrokenGpu>,
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Compiler {
    version: String,
    /// File; none if the system's search found it.
    path: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct GpuRecord {
    device: String,
    name: String,
    architecture: String,
    /// Whether kernels can be compiled for the architecture.
    is_supported: bool,
    memory: u64,
    multiprocessors: u32,
    shared_memory: u32,
    pci: String,
    /// Devices whose memory this one can access directly.
    peers: Vec<String>,
}

#[derive(Debug, Serialize)]
struct BrokenGpu {
    device: String,
    error: String,
}

/// Lists the devices of this machine.
pub fn run(args: DevicesArgs) -> Result<()> {
    let mut flags = Overrides::default();
    flags.set("device.nvrtc", args.nvrtc);
    let config = Config::from_process(args.config.as_deref(), flags)?;
    let devices = Devices { cpu: Cpu::find(&config.device)?, cuda: Cuda::find(&config.device) };
    print("devices", &if args.json { to_json(&devices) } else { devices.text() })
}

impl Cpu {
    fn find(config: &DeviceConfig) -> Result<Cpu> {
        let device = start::describe_cpu(config)?;
        Ok(Cpu { name: start::machine::cpu_name(), device, available_memory: available_memory() })
    }
}

impl Cuda {
    fn find(config: &DeviceConfig) -> Cuda {
        let mut found = Cuda::default();
        let driver = Driver::open().and_then(|driver| {
            found.driver = Some(driver.version().to_string());
            driver.gpus()
        });
        match driver {
            Ok(gpus) => gpus.into_iter().enumerate().for_each(|(number, gpu)| match gpu {
                Ok(gpu) => found.gpus.push(GpuRecord::from(gpu)),
                Err(error) => found
                    .broken
                    .push(BrokenGpu { device: format!("cuda:{number}"), error: error.to_string() }),
            }),
            Err(error) => found.missing.push(error.to_string()),
        }
        match Nvrtc::open(config.nvrtc.as_deref()) {
            Ok(nvrtc) => {
                let path = nvrtc.path().map(PathBuf::from);
                found.nvrtc = Some(Compiler { version: nvrtc.version().to_string(), path });
            }
            Err(error) => found.missing.push(error.to_string()),
        }
        found
    }
}

impl From<Gpu> for GpuRecord {
    fn from(gpu: Gpu) -> GpuRecord {
        let [domain, bus, device] = gpu.pci;
        GpuRecord {
            device: format!("cuda:{}", gpu.number),
            name: gpu.name,
            is_supported: gpu.architecture >= Architecture::OLDEST,
            architecture: gpu.architecture.to_string(),
            memory: gpu.memory,
            multiprocessors: gpu.multiprocessors,
            shared_memory: gpu.shared_memory,
            pci: format!("{domain:04x}:{bus:02x}:{device:02x}"),
            peers: gpu.peers.iter().map(|peer| format!("cuda:{peer}")).collect(),
        }
    }
}

impl Devices {
    fn text(&self) -> String {
        let Devices { cpu, cuda } = self;
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:<8}  {value}");
        };
        let memory = BinaryBytes(cpu.available_memory as u64);
        line("cpu:0", format!("{}: {}, {memory} of memory available", cpu.name, cpu.device));
        for gpu in &cuda.gpus {
            let GpuRecord { name, architecture, multiprocessors, pci, .. } = gpu;
            let memory = BinaryBytes(gpu.memory);
            let peers = match &gpu.peers[..] {
                [] => String::new(),
                peers => format!(", direct access to {}", peers.join(", ")),
            };
            let what = format!("{architecture}, {memory} of memory, {multiprocessors} multiprocessors");
            let age = match gpu.is_supported {
                true => String::new(),
                false => format!("; too old: {} or later is required", Architecture::OLDEST),
            };
            line(&gpu.device, format!("{name}: {what}, PCI {pci}{peers}{age}"));
        }
        cuda.broken.iter().for_each(|gpu| line(&gpu.device, gpu.error.clone()));
        if let Some(version) = &cuda.driver {
            line("driver", format!("CUDA {version}"));
        }
        if let Some(Compiler { version, path }) = &cuda.nvrtc {
            let path = path.as_ref().map(|path| format!(", {}", path.display())).unwrap_or_default();
            line("nvrtc", format!("{version}{path}"));
        }
        cuda.missing.iter().for_each(|reason| line("no cuda", reason.clone()));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u32, architecture: Architecture, peers: Vec<u32>) -> GpuRecord {
        GpuRecord::from(Gpu {
            number,
            name: "GPU of a test".into(),
            architecture,
            memory: 80 << 30,
            multiprocessors: 132,
            shared_memory: 227 << 10,
            pci: [0, 0x3b, 0],
            peers,
        })
    }

    #[test]
    fn every_gpu_has_a_line_and_so_has_everything_that_is_missing() {
        let hopper = Architecture { major: 9, minor: 0 };
        let devices = Devices {
            cpu: Cpu {
                name: "CPU of a test".into(),
                device: "cpu (avx2, 2 threads)".into(),
                available_memory: 1 << 30,
            },
            cuda: Cuda {
                driver: Some("13.0".into()),
                gpus: vec![gpu(0, hopper, vec![1]), gpu(1, Architecture::OLDEST, vec![])],
                broken: vec![BrokenGpu { device: "cuda:2".into(), error: "device fault: it fell".into() }],
                missing: vec!["NVRTC is not found".into()],
                ..Cuda::default()
            },
        };
        assert_eq!(
            devices.text(),
            "cpu:0     CPU of a test: cpu (avx2, 2 threads), 1.00 GiB of memory available\n\
             cuda:0    GPU of a test: sm_90, 80.00 GiB of memory, 132 multiprocessors, PCI 0000:3b:00, \
             direct access to cuda:1\n\
             cuda:1    GPU of a test: sm_80, 80.00 GiB of memory, 132 multiprocessors, PCI 0000:3b:00\n\
             cuda:2    device fault: it fell\n\
             driver    CUDA 13.0\n\
             no cuda   NVRTC is not found\n"
        );
    }

    #[test]
    fn gpus_before_ampere_are_too_old() {
        let turing = gpu(0, Architecture { major: 7, minor: 5 }, vec![]);
        assert!(!turing.is_supported);
        let cpu = Cpu { name: String::new(), device: String::new(), available_memory: 0 };
        let devices = Devices { cpu, cuda: Cuda { gpus: vec![turing], ..Cuda::default() } };
        assert!(devices.text().contains("too old: sm_80 or later"), "{}", devices.text());
    }
}
