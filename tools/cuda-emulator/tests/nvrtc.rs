//! Kernels that NVRTC compiles run through cudarc as on a device. The environment variable `NVRTC_FOLDER`
//! names the folder that has NVRTC; without it the check is skipped, which is printed.
//!
//! A program without a harness, so that what is skipped is seen.

use cuda::Emulator;
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use std::path::PathBuf;

const SOURCE: &str = r#"
extern "C" __global__ void scale(const float* x, float* y, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * by + 1.0f;
}
extern "C" __global__ void sum(const float* x, float* y, int n) {
    __shared__ float part[32];
    float s = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) s += x[i];
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        float t = 0;
        for (int i = 0; i < blockDim.x / 32; i++) t += part[i];
        *y = t;
    }
}
"#;

fn main() {
    let Some(folder) = std::env::var_os("NVRTC_FOLDER") else {
        println!("skipped: kernels that NVRTC compiles (NVRTC_FOLDER does not name the folder that has it)");
        return;
    };
    let library = PathBuf::from(folder).join("libnvrtc.so.12");
    // SAFETY: NVRTC's initializers have no preconditions.
    std::mem::forget(unsafe { libloading::Library::new(library) }.expect("NVRTC loads"));
    let _emulator = Emulator::load();
    for arch in ["compute_80", "compute_90"] {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var("CUDA_EMULATOR_COMPUTE", "9.0") };
        let options = CompileOptions { arch: Some(arch), ..CompileOptions::default() };
        let ptx = compile_ptx_with_opts(SOURCE, options).expect("the source is right");
        let context = CudaContext::new(0).expect("there is a device");
        let stream = context.new_stream().expect("streams are free");
        let module = context.load_module(ptx).expect("the emulator knows the PTX");
        let x: Vec<f32> = (0..1000).map(|it| it as f32).collect();
        let from = stream.clone_htod(&x).expect("memory is free");
        let mut to = stream.alloc_zeros::<f32>(x.len()).expect("memory is free");
        let scale = module.load_function("scale").expect("it is there");
        let (by, n) = (3f32, 1000i32);
        let config = LaunchConfig { grid_dim: (4, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the arguments are those of the kernel.
        unsafe { stream.launch_builder(&scale).arg(&from).arg(&mut to).arg(&by).arg(&n).launch(config) }
            .expect("it launches");
        let y = stream.clone_dtoh(&to).expect("it runs");
        assert!(x.iter().zip(&y).all(|(x, y)| *y == x * 3.0 + 1.0));
        let sum = module.load_function("sum").expect("it is there");
        let mut total = stream.alloc_zeros::<f32>(1).expect("memory is free");
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: as above.
        unsafe { stream.launch_builder(&sum).arg(&from).arg(&mut total).arg(&n).launch(config) }
            .expect("it launches");
        assert_eq!(stream.clone_dtoh(&total).expect("it runs"), [499_500.0]);
    }
    println!("kernels that NVRTC compiled have run");
}
