//! Lists the partitions of a model over the configured devices that are worth comparing.
//!
//! Invariant: each partition uses all devices, in order, and no stage has devices of two kinds.

use crate::config::{DeviceConfig, DeviceName, Groups};

/// A split of a model over devices.
#[derive(Clone, Debug)]
pub struct Strategy {
    /// Name: `layer-wise`, `tensor-wise`, `hybrid`, or `single`.
    pub name: &'static str,
    pub device: DeviceConfig,
    /// Whether this is the configured strategy.
    pub is_configured: bool,
}

/// Returns every even split of the configured devices, and the configured one if it differs.
pub fn strategies(configured: &DeviceConfig) -> Vec<Strategy> {
    let devices: Vec<DeviceName> = configured.devices().copied().collect();
    let strategy = |groups: Groups| Strategy {
        name: strategy_name(&groups),
        is_configured: configured.has_default_split() && groups == configured.groups,
        device: configured.regrouped(&groups),
    };
    let mut all: Vec<Strategy> = even_groups(&devices).into_iter().map(strategy).collect();
    if !all.iter().any(|strategy| strategy.is_configured) {
        let name = strategy_name(&configured.groups);
        all.push(Strategy { name, device: configured.clone(), is_configured: true });
    }
    all
}

/// Returns the groups of n stages with m ranks for every n x m that equals the number of devices, from most
/// stages to one, except those with devices of different kinds in a stage.
fn even_groups(devices: &[DeviceName]) -> Vec<Groups> {
    let divides = |ranks: &usize| devices.len().is_multiple_of(*ranks);
    let ways = (1..=devices.len()).filter(divides);
    let ways = ways.map(|ranks| devices.chunks(ranks).map(<[DeviceName]>::to_vec).collect());
    ways.filter(|groups: &Groups| groups.iter().all(|stage| is_of_one_kind(stage))).collect()
}

fn is_of_one_kind(stage: &[DeviceName]) -> bool {
    stage.iter().all(|device| device.kind == stage[0].kind)
}

/// Returns the name of a partition into these groups.
fn strategy_name(groups: &Groups) -> &'static str {
    match (groups.len(), groups.iter().map(Vec::len).max().unwrap_or(0)) {
        (1, 1) => "single",
        (_, 1) => "layer-wise",
        (1, _) => "tensor-wise",
        _ => "hybrid",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, DeviceKind, Overrides, format_groups};

    fn devices(number: u32) -> Vec<DeviceName> {
        (0..number).map(|number| DeviceName { kind: DeviceKind::Cpu, number }).collect()
    }

    #[test]
    fn every_way_to_make_up_the_devices_is_there() {
        let shown = |number: u32| -> Vec<(&str, usize, usize)> {
            let all = even_groups(&devices(number));
            all.iter().map(|groups| (strategy_name(groups), groups.len(), groups[0].len())).collect()
        };
        assert_eq!(shown(4), [("layer-wise", 4, 1), ("hybrid", 2, 2), ("tensor-wise", 1, 4)]);
        assert_eq!(
            shown(6),
            [("layer-wise", 6, 1), ("hybrid", 3, 2), ("hybrid", 2, 3), ("tensor-wise", 1, 6)]
        );
        assert_eq!(shown(1), [("single", 1, 1)]);
        assert_eq!(shown(3), [("layer-wise", 3, 1), ("tensor-wise", 1, 3)]);
    }

    #[test]
    fn a_stage_has_devices_of_one_kind() {
        let names = |kinds: [DeviceKind; 4]| -> Vec<String> {
            let device = |(kind, number)| DeviceName { kind, number };
            let devices: Vec<DeviceName> = kinds.into_iter().zip(0..).map(device).collect();
            even_groups(&devices).iter().map(|groups| format_groups(groups)).collect()
        };
        use DeviceKind::{Cpu, Reference};
        let by_layers = "cpu:0;cpu:1;reference:2;reference:3";
        assert_eq!(
            names([Cpu, Cpu, Reference, Reference]),
            [by_layers, "cpu:0&cpu:1;reference:2&reference:3"]
        );
        assert_eq!(names([Cpu, Reference, Cpu, Reference]), ["cpu:0;reference:1;cpu:2;reference:3"]);
    }

    #[test]
    fn the_configured_way_is_there_once() {
        let shown = |settings: &[(&'static str, &str)]| -> Vec<(String, Vec<usize>, bool)> {
            let mut flags = Overrides::default();
            settings.iter().for_each(|(key, value)| flags.set(key, Some(*value)));
            let all = strategies(&Config::load(None, flags).unwrap().device);
            let of = |way: &Strategy| {
                (format_groups(&way.device.groups), way.device.layers.clone(), way.is_configured)
            };
            all.iter().map(of).collect()
        };
        let way = |groups: &str, layers: &[usize], is_configured| {
            (groups.to_owned(), layers.to_vec(), is_configured)
        };
        let (layers, tensors) = ("cpu:0;cpu:1", "cpu:0&cpu:1");
        assert_eq!(shown(&[("device.groups", "0&1")]), [way(layers, &[], false), way(tensors, &[], true)]);
        // Equal shares are the same as the default split.
        let equal = [("device.groups", "0&1"), ("device.shares", "1&1")];
        assert_eq!(shown(&equal), [way(layers, &[], false), way(tensors, &[], true)]);
        assert_eq!(
            shown(&[("device.groups", "0;1"), ("device.layers", "3,1")]),
            [way(layers, &[], false), way(tensors, &[], false), way(layers, &[3, 1], true)]
        );
        let uneven = "cpu:0&cpu:1;cpu:2";
        assert_eq!(shown(&[("device.groups", uneven)]).last(), Some(&way(uneven, &[], true)));
    }
}
