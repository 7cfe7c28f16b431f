//! The driver's interface, through cudarc as it is published: order, waiting, graphs, several devices, and
//! failures.

use cuda::Emulator;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, LaunchConfig, PushKernelArg, result,
};
use cudarc::nvrtc::Ptx;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

const PTX: &str = r"
.version 8.0
.target sm_80
.address_size 64
.global .align 4 .u32 counter = 5;
.extern .shared .align 16 .b8 dynamic[];

.visible .entry add(.param .u64 add_0, .param .u64 add_1, .param .u32 add_2, .param .u32 add_3) {
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %x<8>;
    ld.param.u64 %x1, [add_0]; ld.param.u64 %x2, [add_1];
    ld.param.u32 %r1, [add_2]; ld.param.u32 %r2, [add_3];
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.s32 %r3, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r3, %r2; @%p1 bra DONE;
    mul.wide.u32 %x3, %r3, 4; add.s64 %x1, %x1, %x3; add.s64 %x2, %x2, %x3;
    ld.global.u32 %r6, [%x1]; add.s32 %r6, %r6, %r1; st.global.u32 [%x2], %r6;
    DONE: ret;
}
.visible .entry wild(.param .u64 wild_0) {
    .reg .b32 %r<2>; .reg .b64 %x<2>;
    ld.param.u64 %x1, [wild_0]; mov.u32 %r1, 1; st.global.u32 [%x1+1048576], %r1; ret;
}
.visible .entry racy(.param .u64 racy_0) {
    .reg .b32 %r<2>; .reg .b64 %x<2>;
    ld.param.u64 %x1, [racy_0]; mov.u32 %r1, %tid.x; st.global.u32 [%x1], %r1; ret;
}
.visible .entry large(.param .u64 large_0) .maxntid 64, 1, 1 {
    .reg .b32 %r<3>; .reg .b64 %x<2>;
    ld.param.u64 %x1, [large_0]; mov.u32 %r1, 3; st.shared.u32 [dynamic+61440], %r1;
    ld.shared.u32 %r2, [dynamic+61440]; st.global.u32 [%x1], %r2; ret;
}
.visible .entry meet(.param .u64 meet_0) {
    .reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %x<2>;
    ld.param.u64 %x1, [meet_0]; membar.gl; red.global.add.u32 [%x1], 1;
    WAIT: ld.volatile.global.u32 %r1, [%x1]; setp.lt.u32 %p1, %r1, 3; @%p1 bra WAIT;
    membar.gl; ret;
}
";

/// Loads the emulator in the place of the driver, once.
fn emulator() -> &'static Emulator {
    static EMULATOR: OnceLock<Emulator> = OnceLock::new();
    EMULATOR.get_or_init(|| {
        // SAFETY: the tests hold a lock while they change variables, and no other thread reads them.
        unsafe { std::env::set_var("CUDA_EMULATOR_DEVICES", "3") };
        Emulator::load()
    })
}

/// Findings, as lines of JSON.
fn findings() -> String {
    emulator().findings()
}

/// One test at a time has the emulator, with the settings given.
fn begin(settings: &[(&str, &str)]) -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let emulator = emulator();
    for name in ["INJECT", "MEMORY", "FINDINGS", "SEED"] {
        // SAFETY: as in `emulator`.
        unsafe { std::env::remove_var(format!("CUDA_EMULATOR_{name}")) };
    }
    // No queued work runs by chance, so that waiting too little shows always.
    let lazy = [("EAGER", "0")];
    for (name, value) in lazy.iter().chain(settings) {
        // SAFETY: as in `emulator`.
        unsafe { std::env::set_var(format!("CUDA_EMULATOR_{name}"), value) };
    }
    emulator.reset();
    guard
}

/// A device with a stream and the module above.
struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    module: Arc<CudaModule>,
}

fn device(ordinal: usize) -> Device {
    let context = CudaContext::new(ordinal).expect("there is a device");
    // SAFETY: the tests order work themselves.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().expect("streams are free");
    let module = context.load_module(Ptx::from_src(PTX)).expect("the module is right");
    Device { context, stream, module }
}

impl Device {
    fn function(&self, name: &str) -> CudaFunction {
        self.module.load_function(name).expect("the module has it")
    }

    /// `to = from + by`.
    fn add(&self, from: &CudaSlice<u32>, to: &mut CudaSlice<u32>, by: u32) -> Result<(), DriverError> {
        let (function, n) = (self.function("add"), from.len() as u32);
        let config =
            LaunchConfig { grid_dim: (n.div_ceil(64), 1, 1), block_dim: (64, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the arguments are those of the kernel.
        unsafe { self.stream.launch_builder(&function).arg(from).arg(to).arg(&by).arg(&n).launch(config) }
            .map(drop)
    }

    fn one(&self, name: &str, to: &mut CudaSlice<u32>, config: LaunchConfig) -> Result<(), DriverError> {
        let function = self.function(name);
        // SAFETY: the arguments are those of the kernel.
        unsafe { self.stream.launch_builder(&function).arg(to).launch(config) }.map(drop)
    }
}

fn threads(ctas: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (ctas, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

fn code<T: std::fmt::Debug>(result: Result<T, DriverError>) -> CUresult {
    result.expect_err("it must fail").0
}

#[test]
fn properties() {
    let _one = begin(&[]);
    assert_eq!(CudaContext::device_count(), Ok(3));
    let device = device(2);
    assert_eq!(device.context.compute_capability(), Ok((8, 0)));
    assert_eq!(device.context.name().as_deref(), Ok("Emulated GPU (sm_80)"));
    assert_eq!(device.context.uuid().expect("it has one").bytes[15] as u8, b'2');
    assert_eq!(device.function("large").max_threads_per_block(), Ok(64));
    let occupancy = device.function("add").occupancy_max_active_blocks_per_multiprocessor(256, 0, None);
    assert_eq!(occupancy, Ok(8));
    assert_eq!(code(CudaContext::new(3)), CUresult::CUDA_ERROR_INVALID_DEVICE);
    assert_eq!(code(device.module.load_function("nothing")), CUresult::CUDA_ERROR_NOT_FOUND);
    let counter = device.module.get_global("counter", &device.stream).expect("it is there");
    assert_eq!(device.stream.clone_dtoh(&counter).expect("it copies"), [5, 0, 0, 0]);
}

#[test]
fn images_that_cannot_run_are_refused() {
    let _one = begin(&[]);
    let device = device(0);
    let refused = |text: &str| code(device.context.load_module(Ptx::from_src(text)));
    let unknown = PTX.replace("membar.gl; red", "wgmma.fence.sync.aligned; red");
    assert_eq!(refused(&unknown), CUresult::CUDA_ERROR_INVALID_PTX);
    assert!(findings().contains("wgmma.fence.sync.aligned"), "{}", findings());
    assert_eq!(refused(&PTX.replace("sm_80", "sm_90")), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    assert_eq!(refused(&PTX.replace("8.0", "99.0")), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    let mut module = std::ptr::null_mut();
    // SAFETY: the image is longer than its magic number.
    let elf = unsafe { sys::cuModuleLoadData(&raw mut module, c"\x7fELF\x02\x01".as_ptr().cast()) };
    assert_eq!(elf, CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
}

/// A pinned source is read when the copy runs, and a pinned target written then: nothing has happened
/// before a wait.
#[test]
fn copies_are_late() {
    let _one = begin(&[]);
    let device = device(0);
    // SAFETY: the memory is written before it is read.
    let mut source = unsafe { device.context.alloc_pinned_with_flags::<u32>(4, 0) }.expect("memory is free");
    // SAFETY: as above.
    let mut target = unsafe { device.context.alloc_pinned_with_flags::<u32>(4, 0) }.expect("memory is free");
    source.as_mut_slice().expect("nothing is queued").copy_from_slice(&[1, 2, 3, 4]);
    target.as_mut_slice().expect("nothing is queued").fill(0);
    let mut buffer = device.stream.alloc_zeros::<u32>(4).expect("memory is free");
    let source_at = source.as_mut_ptr().expect("it has one");
    let target_at = target.as_mut_ptr().expect("it has one");
    device.stream.memcpy_htod(&source, &mut buffer).expect("it is queued");
    device.stream.memcpy_dtoh(&buffer, &mut target).expect("it is queued");
    // SAFETY: the pointers lead to pinned memory that nobody else uses; only the queued copies will.
    unsafe {
        assert_eq!(target_at.read(), 0, "nobody has waited");
        // A buffer that is reused too early changes what is copied.
        source_at.write(9);
        device.stream.synchronize().expect("it runs");
        assert_eq!(std::slice::from_raw_parts(target_at, 4), [9, 2, 3, 4]);
    }
    // Memory that is not pinned is staged at the call.
    let mut pageable = vec![5, 6, 7, 8];
    device.stream.memcpy_htod(&pageable, &mut buffer).expect("it is queued");
    pageable.fill(0);
    assert_eq!(device.stream.clone_dtoh(&buffer).expect("it runs"), [5, 6, 7, 8]);
}

/// Streams run apart; events order them. The caller of a query makes progress.
#[test]
fn events_order_streams() {
    let _one = begin(&[]);
    let device = device(0);
    let other = device.context.new_stream().expect("streams are free");
    let from = device.stream.clone_htod(&[1u32; 100]).expect("memory is free");
    let mut middle = device.stream.alloc_zeros::<u32>(100).expect("memory is free");
    device.stream.synchronize().expect("it runs");
    device.add(&from, &mut middle, 5).expect("it is queued");
    // Without an event the other stream sees what was there before.
    assert_eq!(other.clone_dtoh(&middle).expect("it runs")[0], 0);
    let event = device.stream.record_event(None).expect("it is queued");
    other.wait(&event).expect("it is queued");
    assert_eq!(other.clone_dtoh(&middle).expect("it runs"), [6; 100]);
    device.add(&from, &mut middle, 7).expect("it is queued");
    let event = device.stream.record_event(None).expect("it is queued");
    assert!(!event.is_complete());
    while !event.is_complete() {}
    event.synchronize().expect("it is complete");
    assert_eq!(other.clone_dtoh(&middle).expect("it runs")[99], 8);
}

/// A graph is captured once, replayed, and updated; what captures forbid fails, and fails the capture.
#[test]
fn graphs() {
    let _one = begin(&[]);
    let device = device(0);
    let from = device.stream.clone_htod(&[1u32; 100]).expect("memory is free");
    let mut to = device.stream.alloc_zeros::<u32>(100).expect("memory is free");
    let mut twice = device.stream.alloc_zeros::<u32>(100).expect("memory is free");
    device.stream.synchronize().expect("it runs");
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let other = device.context.new_stream().expect("streams are free");
    let mut capture = |by: u32| {
        device.stream.begin_capture(mode).expect("it begins");
        device.add(&from, &mut to, by).expect("it is captured");
        // A branch in another stream, joined again.
        let event = device.stream.record_event(None).expect("it is captured");
        other.wait(&event).expect("it is captured");
        other.memcpy_dtod(&to, &mut twice).expect("it is captured");
        let event = other.record_event(None).expect("it is captured");
        device.stream.wait(&event).expect("it is captured");
        device.stream.end_capture(CUgraphInstantiate_flags(0)).expect("it ends").expect("it has nodes")
    };
    let (graph, changed) = (capture(10), capture(20));
    let read = |slice: &CudaSlice<u32>| device.stream.clone_dtoh(slice).expect("it runs")[0];
    assert_eq!(read(&from), 1);
    for _ in 0..2 {
        graph.launch().expect("it is queued");
    }
    device.stream.synchronize().expect("it runs");
    let mut info = sys::CUgraphExecUpdateResultInfo {
        result: sys::CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR,
        errorNode: std::ptr::null_mut(),
        errorFromNode: std::ptr::null_mut(),
    };
    let host = device.stream.clone_htod(&[0u32; 100]).expect("memory is free");
    drop(host);
    // SAFETY: the handles are alive.
    let updated =
        unsafe { sys::cuGraphExecUpdate_v2(graph.cu_graph_exec(), changed.cu_graph(), &raw mut info) };
    assert_eq!(updated, CUresult::CUDA_SUCCESS);
    graph.launch().expect("it is queued");
    assert_eq!(read(&from), 1);
    drop((graph, changed));
    assert_eq!((read(&to), read(&twice)), (21, 21));
    // Waiting for a stream that is captured is an error, and spoils the capture.
    device.stream.begin_capture(mode).expect("it begins");
    assert_eq!(code(device.stream.synchronize()), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    let ended = device.stream.end_capture(CUgraphInstantiate_flags(0)).map(|it| it.is_some());
    assert_eq!(code(ended), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    // So is a branch that is not joined.
    device.stream.begin_capture(mode).expect("it begins");
    let event = device.stream.record_event(None).expect("it is captured");
    other.wait(&event).expect("it is captured");
    other.memcpy_dtod(&from, &mut to).expect("it is captured");
    let ended = device.stream.end_capture(CUgraphInstantiate_flags(0)).map(|it| it.is_some());
    assert_eq!(code(ended), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    device.stream.synchronize().expect("nothing is captured any more");
}

/// Devices run in threads of their own, and copy to one another.
#[test]
fn several_devices() {
    let _one = begin(&[]);
    let sums: Vec<u32> = std::thread::scope(|scope| {
        let work = |ordinal: usize| {
            scope.spawn(move || {
                let device = device(ordinal);
                let mut slice = device.stream.clone_htod(&[ordinal as u32; 1000]).expect("memory is free");
                let mut to = device.stream.alloc_zeros::<u32>(1000).expect("memory is free");
                for _ in 0..20 {
                    device.add(&slice, &mut to, 1).expect("it is queued");
                    std::mem::swap(&mut slice, &mut to);
                }
                device.stream.clone_dtoh(&slice).expect("it runs").iter().sum()
            })
        };
        let threads: Vec<_> = (0..3).map(work).collect();
        threads.into_iter().map(|it| it.join().expect("it does not panic")).collect()
    });
    assert_eq!(sums, [20_000, 21_000, 22_000]);
    let (a, b) = (device(0), device(1));
    let from = a.stream.clone_htod(&[3u32; 100]).expect("memory is free");
    let mut middle = a.stream.alloc_zeros::<u32>(100).expect("memory is free");
    a.add(&from, &mut middle, 4).expect("it is queued");
    let to = b.stream.alloc_zeros::<u32>(100).expect("memory is free");
    let event = a.stream.record_event(None).expect("it is queued");
    b.stream.wait(&event).expect("it is queued");
    let (to_at, from_at) = {
        use cudarc::driver::DevicePtr;
        (to.device_ptr(&b.stream).0, middle.device_ptr(&a.stream).0)
    };
    b.context.bind_to_thread().expect("it is alive");
    // SAFETY: both allocations have 400 bytes.
    unsafe {
        result::memcpy_peer_async(
            b.context.cu_ctx(),
            to_at,
            a.context.cu_ctx(),
            from_at,
            400,
            b.stream.cu_stream(),
        )
    }
    .expect("it is queued");
    assert_eq!(b.stream.clone_dtoh(&to).expect("it runs"), [7; 100]);
}

#[test]
fn memory_is_limited() {
    let _one = begin(&[("MEMORY", "1048576")]);
    let context = CudaContext::new(1).expect("there is a device");
    let stream = context.new_stream().expect("streams are free");
    assert_eq!(context.mem_get_info(), Ok((1_048_576, 1_048_576)));
    let first = stream.alloc_zeros::<u8>(1_000_000).expect("it fits");
    assert_eq!(code(stream.alloc_zeros::<u8>(100_000)), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    drop(first);
    stream.synchronize().expect("it runs");
    drop(stream.alloc_zeros::<u8>(1_000_000).expect("it fits again"));
    drop(stream);
    drop(context);
}

/// An illegal address poisons the context; another device goes on, and a new context is sound.
#[test]
fn errors_stick() {
    let _one = begin(&[]);
    {
        let (bad, good) = (device(0), device(1));
        let mut slice = bad.stream.alloc_zeros::<u32>(10).expect("memory is free");
        bad.one("wild", &mut slice, threads(1, 1)).expect("it is queued");
        assert_eq!(code(bad.stream.synchronize()), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(code(bad.stream.alloc_zeros::<u32>(1)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(code(bad.one("wild", &mut slice, threads(1, 1))), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        let found = findings();
        assert!(found.contains("\"kind\":\"out-of-bounds\",\"kernel\":\"wild\""), "{found}");
        let from = good.stream.clone_htod(&[1u32]).expect("the other device is sound");
        let mut to = good.stream.alloc_zeros::<u32>(1).expect("memory is free");
        good.add(&from, &mut to, 1).expect("it is queued");
        assert_eq!(good.stream.clone_dtoh(&to), Ok(vec![2]));
    }
    let again = device(0);
    let slice = again.stream.clone_htod(&[1u32]).expect("the new context is sound");
    assert_eq!(again.stream.clone_dtoh(&slice), Ok(vec![1]));
}

/// A race fails the launch, unless findings are only recorded.
#[test]
fn findings_fail_or_are_recorded() {
    for (setting, fails) in [("error", true), ("record", false)] {
        let _one = begin(&[("FINDINGS", setting)]);
        let device = device(0);
        let mut slice = device.stream.alloc_zeros::<u32>(1).expect("memory is free");
        device.one("racy", &mut slice, threads(1, 32)).expect("it is queued");
        let ended = device.stream.synchronize();
        assert_eq!(ended.is_err(), fails);
        assert!(findings().contains("\"kind\":\"race\""), "{}", findings());
    }
}

/// Failures that are asked for: a launch, an allocation, and a launch that hangs until it is released.
#[test]
fn injected_failures() {
    {
        let _one = begin(&[("INJECT", "device=1 launch=2 error=719; device=0 alloc=2 error=2")]);
        let device = device(1);
        let from = device.stream.clone_htod(&[1u32]).expect("memory is free");
        let mut to = device.stream.alloc_zeros::<u32>(1).expect("memory is free");
        device.add(&from, &mut to, 1).expect("it is queued");
        device.stream.synchronize().expect("the first launch is sound");
        device.add(&from, &mut to, 1).expect("it is queued");
        assert_eq!(code(device.stream.synchronize()), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        let context = CudaContext::new(0).expect("there is a device");
        let stream = context.new_stream().expect("streams are free");
        drop(stream.alloc_zeros::<u32>(1).expect("the first allocation is sound"));
        assert_eq!(code(stream.alloc_zeros::<u32>(1)), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    let _one = begin(&[("INJECT", "device=2 launch=1 hang")]);
    let device = device(2);
    let from = device.stream.clone_htod(&[1u32]).expect("memory is free");
    let mut to = device.stream.alloc_zeros::<u32>(1).expect("memory is free");
    device.add(&from, &mut to, 1).expect("it is queued");
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let device = &device;
        scope.spawn(move || sender.send(device.stream.synchronize()));
        while !findings().contains("hangs, as asked") {
            std::thread::yield_now();
        }
        assert!(receiver.try_recv().is_err(), "it must hang");
        emulator().reset();
        let ended = receiver.recv_timeout(Duration::from_secs(60)).expect("it is released");
        assert_eq!(code(ended), CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
    });
}

/// Shared memory above 48 KiB must be asked for; bounds of launches are checked.
#[test]
fn launches_are_checked() {
    let _one = begin(&[]);
    let device = device(0);
    let mut slice = device.stream.alloc_zeros::<u32>(1).expect("memory is free");
    let config = LaunchConfig { shared_mem_bytes: 61_444, ..threads(1, 1) };
    assert_eq!(code(device.one("large", &mut slice, config)), CUresult::CUDA_ERROR_INVALID_VALUE);
    let function = device.function("large");
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert_eq!(code(function.set_attribute(attribute, 200_000)), CUresult::CUDA_ERROR_INVALID_VALUE);
    function.set_attribute(attribute, 61_444).expect("the device has as much");
    // SAFETY: the argument is the kernel's.
    unsafe { device.stream.launch_builder(&function).arg(&mut slice).launch(config) }.expect("it is queued");
    assert_eq!(device.stream.clone_dtoh(&slice), Ok(vec![3]));
    assert_eq!(
        code(device.one("large", &mut slice, threads(1, 96))),
        CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    );
    assert_eq!(code(device.one("racy", &mut slice, threads(0, 32))), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(code(device.one("racy", &mut slice, threads(1, 2048))), CUresult::CUDA_ERROR_INVALID_VALUE);
}

/// CTAs of a cooperative launch wait for one another.
#[test]
fn cooperative_launches() {
    let _one = begin(&[]);
    let device = device(0);
    let mut slice = device.stream.alloc_zeros::<u32>(1).expect("memory is free");
    let function = device.function("meet");
    let mut launch = |ctas| {
        // SAFETY: the argument is the kernel's.
        unsafe {
            device.stream.launch_builder(&function).arg(&mut slice).launch_cooperative(threads(ctas, 1))
        }
        .map(drop)
    };
    launch(3).expect("it is queued");
    assert_eq!(code(launch(1000)), CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    assert_eq!(device.stream.clone_dtoh(&slice), Ok(vec![3]));
}

/// Functions of the host run in their place in a stream.
#[test]
fn host_functions() {
    let _one = begin(&[]);
    let device = device(0);
    unsafe extern "C" fn count(argument: *mut std::ffi::c_void) {
        // SAFETY: the argument is the counter below.
        unsafe { *argument.cast::<u32>() += 1 };
    }
    let counter = Box::into_raw(Box::new(0u32));
    for _ in 0..2 {
        // SAFETY: the counter lives until the stream is waited for.
        unsafe { sys::cuLaunchHostFunc(device.stream.cu_stream(), Some(count), counter.cast()) }
            .result()
            .expect("it is queued");
    }
    // SAFETY: nobody else has the counter; queued functions run in this thread's waits.
    unsafe {
        assert_eq!(counter.read(), 0);
        device.stream.synchronize().expect("it runs");
        assert_eq!(counter.read(), 2);
        drop(Box::from_raw(counter));
    }
}

/// The legacy stream waits for blocking streams, and they for it; streams that do not block stay apart.
#[test]
fn the_legacy_stream_joins_blocking_ones() {
    let _one = begin(&[]);
    let device = device(0);
    let legacy = device.context.default_stream();
    let from = legacy.clone_htod(&[1u32; 8]).expect("memory is free");
    let mut to = legacy.alloc_zeros::<u32>(8).expect("memory is free");
    legacy.synchronize().expect("it runs");
    // The module's stream does not block, so the legacy stream does not wait for it.
    device.add(&from, &mut to, 1).expect("it is queued");
    assert_eq!(legacy.clone_dtoh(&to).expect("it runs"), [0; 8]);
    device.stream.synchronize().expect("it runs");
    let mut blocking = std::ptr::null_mut();
    // SAFETY: the handle is written, used while the context lives, and destroyed; the range is allocated.
    unsafe {
        use cudarc::driver::DevicePtr;
        let address = to.device_ptr(&legacy).0;
        sys::cuStreamCreate(&raw mut blocking, 0).result().expect("streams are free");
        sys::cuMemsetD32Async(address, 7, 8, blocking).result().expect("it is queued");
        assert_eq!(legacy.clone_dtoh(&to).expect("it runs"), [7; 8]);
        sys::cuStreamDestroy_v2(blocking).result().expect("it is alive");
    }
}

/// Memory that is left when a context ends is a finding.
#[test]
fn leaks_are_found() {
    let _one = begin(&[]);
    let context = CudaContext::new(2).expect("there is a device");
    // SAFETY: the memory is never used.
    unsafe { result::malloc_sync(1234) }.expect("memory is free");
    drop(context);
    let found = findings();
    assert!(found.contains("\"kind\":\"leak\"") && found.contains("1234 bytes of device 2"), "{found}");
}

/// Static and dynamic shared memory together have 48 KiB, unless more is asked for; static memory alone has
/// no more.
#[test]
fn static_shared_memory_counts() {
    let _one = begin(&[]);
    let context = CudaContext::new(0).expect("there is a device");
    let text = |bytes: u32| {
        format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() {{\n
             .shared .align 16 .b8 s[{bytes}];\n.reg .b32 %r<2>;\nmov.u32 %r1, s;\nret;\n}}\n"
        )
    };
    let refused = context.load_module(Ptx::from_src(text(49_168)));
    assert_eq!(code(refused), CUresult::CUDA_ERROR_INVALID_PTX);
    assert!(findings().contains("49168 bytes of static shared memory"));
    let module = context.load_module(Ptx::from_src(text(16_384))).expect("the module is right");
    let function = module.load_function("k").expect("the module has it");
    let stream = context.default_stream();
    let launch = |bytes| {
        let config = LaunchConfig { shared_mem_bytes: bytes, ..threads(1, 1) };
        // SAFETY: the kernel has no parameters.
        unsafe { stream.launch_builder(&function).launch(config) }.map(drop)
    };
    launch(32_768).expect("it fits");
    assert_eq!(code(launch(32_784)), CUresult::CUDA_ERROR_INVALID_VALUE);
    stream.synchronize().expect("it runs");
}

/// Functions end with their module.
#[test]
fn modules_take_their_functions_along() {
    let _one = begin(&[]);
    let device = device(0);
    let text = std::ffi::CString::new(PTX).expect("it has no zero");
    // SAFETY: the image ends with a zero; handles are used as the driver gave them.
    unsafe {
        let module = result::module::load_data(text.as_ptr().cast()).expect("the module is right");
        let function = result::module::get_function(module, c"racy".to_owned()).expect("it has it");
        result::module::unload(module).expect("it is loaded");
        let stream = device.stream.cu_stream();
        let launched = result::launch_kernel(function, (1, 1, 1), (1, 1, 1), 0, stream, &mut []);
        assert_eq!(code(launched), CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
}

/// An event is recorded in streams of its own context only; other contexts may wait for it.
#[test]
fn events_belong_to_contexts() {
    let _one = begin(&[]);
    let (first, second) = (device(0), device(1));
    first.context.bind_to_thread().expect("it is alive");
    let event = first.context.new_event(None).expect("events are free");
    let raw = event.cu_event();
    // SAFETY: the event and the streams are alive.
    unsafe {
        let wrong = result::event::record(raw, second.stream.cu_stream());
        assert_eq!(code(wrong), CUresult::CUDA_ERROR_INVALID_HANDLE);
        result::event::record(raw, first.stream.cu_stream()).expect("they belong together");
        second.context.bind_to_thread().expect("it is alive");
        sys::cuStreamWaitEvent(second.stream.cu_stream(), raw, 0).result().expect("it may wait");
    }
    second.stream.synchronize().expect("it runs");
}

/// Functions of the host may not call the driver.
#[test]
fn host_functions_do_not_call_the_driver() {
    let _one = begin(&[]);
    let device = device(0);
    unsafe extern "C" fn call(argument: *mut std::ffi::c_void) {
        // SAFETY: the argument is the result below.
        unsafe { *argument.cast::<CUresult>() = sys::cuCtxSynchronize() };
    }
    let result = Box::into_raw(Box::new(CUresult::CUDA_SUCCESS));
    // SAFETY: the result lives until the stream is waited for.
    unsafe {
        sys::cuLaunchHostFunc(device.stream.cu_stream(), Some(call), result.cast())
            .result()
            .expect("it is queued");
        device.stream.synchronize().expect("it runs");
        assert_eq!(*Box::from_raw(result), CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
}

/// A copy from pinned memory ends within it.
#[test]
fn copies_end_in_pinned_memory() {
    let _one = begin(&[]);
    let device = device(0);
    let slice = device.stream.alloc_zeros::<u8>(64).expect("memory is free");
    // SAFETY: the memory is not used but by refused copies, and freed once.
    unsafe {
        use cudarc::driver::DevicePtr;
        let address = slice.device_ptr(&device.stream).0;
        let pinned = result::malloc_host(32, 0).expect("memory is free");
        let stream = device.stream.cu_stream();
        let up = sys::cuMemcpyHtoDAsync_v2(address, pinned, 33, stream);
        assert_eq!(up, CUresult::CUDA_ERROR_INVALID_VALUE);
        let down = sys::cuMemcpyDtoHAsync_v2(pinned, address, 33, stream);
        assert_eq!(down, CUresult::CUDA_ERROR_INVALID_VALUE);
        result::free_host(pinned).expect("it is alive");
    }
}

/// The host reads nothing that nobody wrote.
#[test]
fn downloads_of_unwritten_memory() {
    let _one = begin(&[("FINDINGS", "record")]);
    let device = device(0);
    // SAFETY: what is read is only compared.
    let mut slice = unsafe { device.stream.alloc::<u32>(40) }.expect("memory is free");
    let from = device.stream.clone_htod(&[7u32; 39]).expect("memory is free");
    device.add(&from, &mut slice, 1).expect("it is queued");
    assert_eq!(device.stream.clone_dtoh(&slice.slice(..39)), Ok(vec![8; 39]));
    assert_eq!(findings(), "");
    device.stream.clone_dtoh(&slice).expect("it is recorded only");
    let found = findings();
    assert!(found.contains("\"kind\":\"uninitialised\"") && found.contains("160 bytes"), "{found}");
}

/// Memory is freed once.
#[test]
fn freeing_twice_is_found() {
    let _one = begin(&[]);
    let context = CudaContext::new(1).expect("there is a device");
    let stream = context.new_stream().expect("streams are free");
    // SAFETY: the memory is not used.
    unsafe {
        let address = result::malloc_async(stream.cu_stream(), 64).expect("memory is free");
        result::free_async(address, stream.cu_stream()).expect("it is queued");
        stream.synchronize().expect("it is freed");
        result::free_async(address, stream.cu_stream()).expect("it is queued");
    }
    assert_eq!(code(stream.synchronize()), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(findings().contains("use-after-free"));
}

/// Events end with their context.
#[test]
fn contexts_take_their_events_along() {
    let _one = begin(&[]);
    // SAFETY: handles are used as the driver gave them, and the context is left as it was.
    unsafe {
        let (mut context, mut event) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut enter = || {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, 2).result()?;
            sys::cuCtxSetCurrent(context).result()
        };
        sys::cuInit(0).result().expect("there are devices");
        enter().expect("there is a device");
        sys::cuEventCreate(&raw mut event, 0).result().expect("events are free");
        sys::cuDevicePrimaryCtxRelease_v2(2).result().expect("it is retained");
        enter().expect("there is a device");
        let legacy = std::ptr::null_mut();
        assert_eq!(sys::cuEventRecord(event, legacy), CUresult::CUDA_ERROR_INVALID_HANDLE);
        sys::cuDevicePrimaryCtxRelease_v2(2).result().expect("it is retained");
    }
}
