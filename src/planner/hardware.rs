//! Speeds and sizes of devices and of the links between them.
//!
//! Invariant: every speed is positive.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::path::Path;

/// A device, described by its speeds and memory size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// Memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Floating-point operations per second.
    pub flops: f64,
    /// Memory size in bytes; infinite if unknown.
    pub memory: f64,
    /// Overhead of an operation in seconds: a kernel launch or a synchronization of threads.
    pub op_seconds: f64,
}

/// A link between devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Latency of a message in seconds, including synchronization.
    pub latency: f64,
    /// Bandwidth in bytes per second.
    pub bandwidth: f64,
}

/// A memory that all devices share; infinite if each device has its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedMemory {
    /// Bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Size in bytes.
    pub memory: f64,
}

impl SharedMemory {
    /// No shared memory: each device has its own.
    pub const UNLIMITED: SharedMemory = SharedMemory { bandwidth: f64::INFINITY, memory: f64::INFINITY };
}

/// The properties of a machine that determine how fast a partition is.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    /// Name in reports.
    pub name: String,
    /// The devices; the last one also stands for all further ones.
    pub devices: Vec<Device>,
    /// The memory that all devices share, if they do.
    pub shared_memory: SharedMemory,
    /// Link between the ranks of a stage.
    pub intra_stage_link: Link,
    /// Link from one stage to the next.
    pub inter_stage_link: Link,
    /// Time of a step outside of all devices, in seconds.
    pub overhead_seconds: f64,
}

impl Link {
    /// Returns the time to send `bytes` bytes, in seconds.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.latency + bytes / self.bandwidth
    }
}

/// Returns four Tesla V100 on PCIe 3 x16, the machine of Shi et al. 2024, Table 5, with the manufacturer's
/// figures.
pub fn v100x4() -> Hardware {
    let link = Link { latency: 50e-6, bandwidth: 12e9 };
    Hardware {
        name: "4 x V100 (PCIe)".to_owned(),
        devices: vec![Device { bandwidth: 900e9, flops: 125e12, memory: 32e9, op_seconds: 5e-6 }],
        shared_memory: SharedMemory::UNLIMITED,
        intra_stage_link: link,
        inter_stage_link: link,
        overhead_seconds: 0.0,
    }
}

impl Hardware {
    /// Returns the device with that number.
    pub fn device(&self, number: usize) -> Device {
        let last = self.devices.last().expect("hardware has a device; this is a bug");
        *self.devices.get(number).unwrap_or(last)
    }

    /// Reads a hardware file. Errors name the file and the key.
    pub fn read(path: &Path) -> Result<Hardware> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let file: HardwareFile = toml::from_str(&text).with_context(|| path.display().to_string())?;
        let hardware = file.hardware(path);
        hardware.check().with_context(|| path.display().to_string())?;
        Ok(hardware)
    }

    fn check(&self) -> Result<()> {
        ensure!(!self.devices.is_empty(), "device: at least one [[device]] is required");
        let positive = |what: &str, value: f64| {
            ensure!(value > 0.0, "{what} must be positive");
            Ok(())
        };
        for device in &self.devices {
            positive("device.bandwidth_gb_s", device.bandwidth)?;
            positive("device.tflops", device.flops)?;
            positive("device.memory_gb", device.memory)?;
            ensure!(device.op_seconds >= 0.0, "device.op_us must not be negative");
        }
        positive("together_gb_s", self.shared_memory.bandwidth)?;
        positive("together_gb", self.shared_memory.memory)?;
        for (name, link) in [("within", self.intra_stage_link), ("between", self.inter_stage_link)] {
            positive(&format!("{name}.bandwidth_gb_s"), link.bandwidth)?;
            ensure!(link.latency >= 0.0, "{name}.latency_us must not be negative");
        }
        Ok(())
    }
}

/// A hardware file, in the units of data sheets.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HardwareFile {
    name: Option<String>,
    device: Vec<DeviceTable>,
    together_gb_s: Option<f64>,
    together_gb: Option<f64>,
    within: LinkTable,
    between: LinkTable,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceTable {
    bandwidth_gb_s: f64,
    tflops: f64,
    memory_gb: Option<f64>,
    #[serde(default)]
    op_us: f64,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkTable {
    latency_us: f64,
    bandwidth_gb_s: f64,
}

impl HardwareFile {
    fn hardware(self, path: &Path) -> Hardware {
        let device = |table: &DeviceTable| Device {
            bandwidth: table.bandwidth_gb_s * 1e9,
            flops: table.tflops * 1e12,
            memory: table.memory_gb.map_or(f64::INFINITY, |gb| gb * 1e9),
            op_seconds: table.op_us / 1e6,
        };
        let link = |table: LinkTable| Link {
            latency: table.latency_us / 1e6,
            bandwidth: table.bandwidth_gb_s * 1e9,
        };
        Hardware {
            name: self.name.unwrap_or_else(|| path.display().to_string()),
            devices: self.device.iter().map(device).collect(),
            shared_memory: SharedMemory {
                bandwidth: self.together_gb_s.map_or(f64::INFINITY, |gb| gb * 1e9),
                memory: self.together_gb.map_or(f64::INFINITY, |gb| gb * 1e9),
            },
            intra_stage_link: link(self.within),
            inter_stage_link: link(self.between),
            overhead_seconds: 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str) -> Result<Hardware, String> {
        let path = std::env::temp_dir().join(format!("mainstem-hardware-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let read = Hardware::read(&path).map_err(|error| format!("{error:#}"));
        std::fs::remove_file(&path).unwrap();
        read
    }

    const LINKS: &str =
        "[within]\nlatency_us = 50\nbandwidth_gb_s = 12\n[between]\nlatency_us = 50\nbandwidth_gb_s = 12";

    #[test]
    fn a_file_can_say_what_is_built_in() {
        let device = "[[device]]\nbandwidth_gb_s = 900\ntflops = 125\nmemory_gb = 32\nop_us = 5\n";
        let text = format!("name = \"4 x V100 (PCIe)\"\n{device}{LINKS}");
        assert_eq!(read("whole", &text), Ok(v100x4()));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_file() {
        let device = "[[device]]\nbandwidth_gb_s = 0\ntflops = 1\n";
        for (name, text, part) in [
            ("none", format!("device = []\n{LINKS}"), "at least one [[device]]"),
            ("zero", format!("{device}{LINKS}"), "device.bandwidth_gb_s must be positive"),
            ("typo", format!("{}{LINKS}", device.replace("tflops", "tflop")), "tflop"),
        ] {
            let error = read(name, &text).unwrap_err();
            assert!(error.contains(part) && error.contains(name), "{error}");
        }
        assert!(format!("{:#}", Hardware::read(Path::new("/no/such")).unwrap_err()).contains("/no/such"));
    }
}
