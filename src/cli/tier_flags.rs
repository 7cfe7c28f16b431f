//! Flags about the memory of devices, and about what lies in it, in the memory of the host, and on disk.
//!
//! Invariant: as in [`super::flags`], flags only pass values on; `--percent` sets the keys of four of them.

use crate::config::Overrides;
use clap::Args;

/// Options of devices with memory of their own, and of the tiers of weights and KV caches.
#[derive(Args)]
#[command(next_help_heading = "Memory tiers")]
pub struct TierFlags {
    /// Memory of each CPU device, such as 600MiB, beside that of the host.
    #[arg(long = "device-memory", value_name = "SIZE")]
    device_memory: Option<String>,
    /// Bytes per second between a device's own memory and the host, such as 8GB/s.
    #[arg(long = "device-link", value_name = "RATE")]
    device_link: Option<String>,
    /// Weights of layers in the devices' own memory: all, auto, 20% or 2GiB.
    #[arg(long = "device-weights", value_name = "SIZE")]
    tiers_device: Option<String>,
    /// KV caches in host memory, of those not on devices: all, auto, 20% or 2GiB.
    #[arg(long = "host-kv-memory", value_name = "SIZE")]
    tiers_host_kv: Option<String>,
    /// Place of attention on KV caches in host memory: the device, or the host.
    #[arg(long = "attend-on", value_name = "PLACE", value_parser = ["device", "host"])]
    tiers_attend_on: Option<String>,
    /// Spread of weights over layers: evenly, or by FlexGen's rule.
    #[arg(long = "tier-rule", value_name = "RULE", value_parser = ["even", "midpoint"])]
    tiers_rule: Option<String>,
    /// Tier of weights by tensor name: a regular expression =device, =host or =disk.
    #[arg(long = "override-tensor", value_name = "PATTERN=TIER")]
    tiers_overrides: Option<Vec<String>>,
    /// Keep the experts of mixtures in host memory.
    #[arg(long = "cpu-moe")]
    tiers_cpu_moe: bool,
    /// FlexGen's six percentages: weights, KV and activations, each on device and host.
    #[arg(long, value_name = "WG,WC,CG,CC,AG,AC", value_parser = Percents::parse,
          conflicts_with_all = ["tiers_device", "tiers_host_kv", "tiers_host", "tiers_kv"])]
    percent: Option<Percents>,
}

impl TierFlags {
    /// Adds the flags that are given.
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("device.memory", self.device_memory);
        overrides.set("device.link", self.device_link);
        overrides.set("tiers.device", self.tiers_device);
        overrides.set("tiers.host_kv", self.tiers_host_kv);
        overrides.set("tiers.attend_on", self.tiers_attend_on);
        overrides.set("tiers.rule", self.tiers_rule);
        overrides.set("tiers.overrides", self.tiers_overrides);
        overrides.set("tiers.cpu_moe", self.tiers_cpu_moe.then_some(true));
        if let Some(Percents { weights, cache }) = self.percent {
            let keys = [("tiers.device", "tiers.host"), ("tiers.kv", "tiers.host_kv")];
            for ((device, host), percents) in keys.into_iter().zip([weights, cache]) {
                overrides.set(device, Some(format!("{}%", percents[0])));
                overrides.set(host, Some(format!("{}%", percents[1])));
            }
        }
    }
}

/// Percentages of weights and of KV caches on the device and in the memory of the host; the rest is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Percents {
    weights: [u8; 2],
    cache: [u8; 2],
}

impl Percents {
    /// Parses FlexGen's six numbers. The last two are for activations, which always stay on the device.
    fn parse(text: &str) -> Result<Percents, String> {
        let numbers = text.split([',', ' ']).map(|number| number.trim().parse::<u8>());
        let numbers: Option<Vec<u8>> = numbers.map(|number| number.ok().filter(|n| *n <= 100)).collect();
        let Some(&[w0, w1, c0, c1, a0, a1]) = numbers.as_deref() else {
            return Err("expected six whole numbers from 0 to 100, as in 20,80,100,0,100,0".into());
        };
        for (what, [device, host]) in [("weights", [w0, w1]), ("KV caches", [c0, c1])] {
            if u16::from(device) + u16::from(host) > 100 {
                return Err(format!("{device} % and {host} % of the {what} are more than 100 %"));
            }
        }
        if [a0, a1] != [100, 0] {
            return Err(format!("activations always stay on the device: 100,0 instead of {a0},{a1}"));
        }
        Ok(Percents { weights: [w0, w1], cache: [c0, c1] })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use crate::config::{Config, HostTier, TierName, TierPattern};
    use clap::Parser;

    fn config(flags: &[&str]) -> Result<Config, String> {
        let line = [&["mainstem", "serve"], flags].concat();
        let cli = Cli::try_parse_from(line).map_err(|error| error.to_string())?;
        let super::super::Command::Serve(args) = cli.command else { panic!("it is serve") };
        let (file, flags) = args.layers();
        Config::load(file.as_deref(), flags).map_err(|error| error.to_string())
    }

    #[test]
    fn percentages_set_four_tiers() {
        let memory = "--device-memory=1GiB";
        let tiers = config(&[memory, "--percent=20,30,40,60,100,0"]).unwrap().tiers;
        let found = [tiers.device, tiers.host, tiers.kv, tiers.host_kv];
        assert_eq!(found, [0.2, 0.3, 0.4, 0.6].map(HostTier::Fraction));
        for (percents, part) in [
            ("20,30,40", "expected six whole numbers from 0 to 100"),
            ("20,30,40,60,100,101", "expected six whole numbers from 0 to 100"),
            ("20,81,0,0,100,0", "20 % and 81 % of the weights are more than 100 %"),
            ("20,80,50,60,100,0", "50 % and 60 % of the KV caches are more than 100 %"),
            ("20,80,0,0,0,100", "activations always stay on the device: 100,0 instead of 0,100"),
        ] {
            let error = config(&[memory, &format!("--percent={percents}")]).unwrap_err();
            assert!(error.contains(part), "{percents}: {error}");
        }
        let both = config(&[memory, "--percent=20,30,40,60,100,0", "--host-memory=0"]).unwrap_err();
        assert!(both.contains("cannot be used with"), "{both}");
        let one_memory = config(&["--percent=20,30,40,60,100,0"]).unwrap_err();
        assert!(one_memory.contains("tiers.device = \"20%\": requires device.memory"), "{one_memory}");
    }

    #[test]
    fn overrides_are_in_the_order_of_their_flags() {
        let flags = ["--override-tensor=a=b\\.[0-9]=disk", "--override-tensor=x=host"];
        let pattern = |pattern: &str, tier| TierPattern { pattern: pattern.into(), tier };
        let expected = [pattern("a=b\\.[0-9]", TierName::Disk), pattern("x", TierName::Host)];
        assert_eq!(config(&flags).unwrap().tiers.overrides, expected);
        for (rule, part) in [
            ("x", "'x': expected PATTERN=device, PATTERN=host or PATTERN=disk"),
            ("x=cloud", "'x=cloud': expected PATTERN=device"),
            ("(=disk", "'(' is not a valid regular expression"),
            ("=disk", "'' is not a valid regular expression"),
        ] {
            let error = config(&["--override-tensor", rule]).unwrap_err();
            assert!(error.contains(part), "{rule}: {error}");
        }
    }

    #[test]
    fn flags_for_a_second_memory_need_one() {
        for flag in [
            "--device-link=8GB/s",
            "--device-weights=20%",
            "--host-kv-memory=0",
            "--attend-on=host",
            "--cpu-moe",
        ] {
            let error = config(&[flag]).unwrap_err();
            assert!(error.contains("requires device.memory"), "{flag}: {error}");
            config(&["--device-memory=1GiB", flag]).unwrap();
        }
        let link = config(&["--device-memory=1GiB", "--device-link=2.5GB/s"]).unwrap().device.link;
        assert_eq!(link, Some(2.5e9));
        for (flag, part) in [
            ("--device-link=8GB", "the unit must end with /s"),
            ("--device=fake", "only CPU devices can have a memory of their own"),
        ] {
            let error = config(&["--device-memory=1GiB", flag]).unwrap_err();
            assert!(error.contains(part), "{flag}: {error}");
        }
    }
}
