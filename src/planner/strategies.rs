//! The partitions of a number of devices that are worth comparing.
//!
//! Invariant: each has all the devices, in order, and no stage has two kinds of them.

use crate::config::{DeviceName, Groups};

/// A way to divide a model among n x m devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strategy {
    /// `layer-wise`, `tensor-wise`, `hybrid`, or `single`.
    pub name: &'static str,
    pub groups: Groups,
}

/// n stages of m members, for every n x m that makes up the number of devices, from all stages to one; but those in which
/// devices of two kinds would share a stage.
pub fn strategies(devices: &[DeviceName]) -> Vec<Strategy> {
    let divides = |members: &usize| devices.len().is_multiple_of(*members);
    let ways = (1..=devices.len()).filter(divides).map(|members| of_members(devices, members));
    ways.filter(|way| way.groups.iter().all(|stage| is_of_one_kind(stage))).collect()
}

/// Stages of so many members each.
fn of_members(devices: &[DeviceName], members: usize) -> Strategy {
    let groups: Groups = devices.chunks(members).map(<[DeviceName]>::to_vec).collect();
    Strategy { name: name(&groups), groups }
}

fn is_of_one_kind(stage: &[DeviceName]) -> bool {
    stage.iter().all(|device| device.kind == stage[0].kind)
}

/// What a partition into these groups is called.
pub fn name(groups: &Groups) -> &'static str {
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
    use crate::config::{DeviceKind, spelled};

    fn devices(number: u32) -> Vec<DeviceName> {
        (0..number).map(|number| DeviceName { kind: DeviceKind::Cpu, number }).collect()
    }

    #[test]
    fn every_way_to_make_up_the_devices_is_there() {
        let shown = |number: u32| -> Vec<(&str, usize, usize)> {
            let all = strategies(&devices(number));
            all.iter().map(|found| (found.name, found.groups.len(), found.groups[0].len())).collect()
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
            strategies(&devices).iter().map(|way| spelled(&way.groups)).collect()
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
    fn ways_are_spelled_as_they_are_configured() {
        assert_eq!(spelled(&strategies(&devices(4))[1].groups), "cpu:0&cpu:1;cpu:2&cpu:3");
    }
}
