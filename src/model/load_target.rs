//! The targets of loading a model: a device, or a counter of the bytes that a device would allocate.
//!
//! Invariant: a model is loaded into both by the same code, so the counted bytes are the allocated ones.

use mainstem_kernels::{
    ActivationType, Backend, DeviceError, DeviceSizes, HeldShapes, KvLayer, KvLayout, MoeShape, QuantType,
    StepLimits, Weight,
};

/// The part of [`Backend`] that loading a model uses.
pub trait LoadTarget {
    /// A buffer of the target.
    type Buf: Send + Sync + 'static;
    /// Whether uploads need data. Otherwise they are empty.
    const READS_DATA: bool;

    /// See [`Backend::describe`].
    fn describe(&self) -> String;

    /// See [`Backend::threads`].
    fn threads(&self) -> usize;

    /// See [`Backend::allocated_bytes`].
    fn allocated_bytes(&self) -> usize;

    /// Returns the bytes of memory that are taken beside those that are allocated: the rest of what buffers
    /// take, and code. Only forecasts count them.
    fn driver_bytes(&self) -> usize {
        0
    }

    /// See [`Backend::activation_type`].
    fn activation_type(&self) -> ActivationType;

    /// See [`Backend::alloc`].
    fn alloc(&mut self, bytes: usize) -> Result<Self::Buf, DeviceError>;

    /// Copies `bytes` from the host to the beginning of `to`.
    fn upload(&mut self, to: &mut Self::Buf, bytes: &[u8]);

    /// See [`Backend::upload_weight`].
    fn upload_weight(
        &mut self,
        ty: QuantType,
        n: usize,
        k: usize,
        bytes: &[u8],
    ) -> Result<Weight<Self::Buf>, DeviceError>;

    /// See [`Backend::prepare_weight`].
    fn prepare_weight(&mut self, ty: QuantType, k: usize) -> Result<(), DeviceError>;

    /// See [`Backend::sizes`].
    fn device_sizes(&self) -> &dyn DeviceSizes;

    /// See [`Backend::download`].
    fn download_packed(&mut self, from: &Self::Buf, bytes: &mut [u8]);

    /// See [`Backend::host_bytes`].
    fn host_bytes(buf: &mut Self::Buf) -> Option<&mut [u8]>;

    /// See [`Backend::alloc_kv`].
    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<Self::Buf>, DeviceError>;

    /// See [`Backend::alloc_host_kv`].
    fn alloc_host_kv(&mut self, layout: KvLayout) -> Result<KvLayer<Self::Buf>, DeviceError>;

    /// See [`Backend::prepare_moe`].
    fn prepare_moe(&mut self, shape: &MoeShape, hidden: usize) -> Result<(), DeviceError>;

    /// See [`Backend::prepare`].
    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError>;
}

impl<B: Backend> LoadTarget for B {
    type Buf = B::Buf;
    const READS_DATA: bool = true;

    fn describe(&self) -> String {
        Backend::describe(self)
    }

    fn threads(&self) -> usize {
        Backend::threads(self)
    }

    fn allocated_bytes(&self) -> usize {
        Backend::allocated_bytes(self)
    }

    fn activation_type(&self) -> ActivationType {
        Backend::activation_type(self)
    }

    fn alloc(&mut self, bytes: usize) -> Result<B::Buf, DeviceError> {
        Backend::alloc(self, bytes)
    }

    fn upload(&mut self, to: &mut B::Buf, bytes: &[u8]) {
        Backend::upload(self, to, 0, bytes);
    }

    fn upload_weight(
        &mut self,
        ty: QuantType,
        n: usize,
        k: usize,
        bytes: &[u8],
    ) -> Result<Weight<B::Buf>, DeviceError> {
        Backend::upload_weight(self, ty, n, k, bytes)
    }

    fn prepare_weight(&mut self, ty: QuantType, k: usize) -> Result<(), DeviceError> {
        Backend::prepare_weight(self, ty, k)
    }

    fn device_sizes(&self) -> &dyn DeviceSizes {
        Backend::sizes(self)
    }

    fn download_packed(&mut self, from: &B::Buf, bytes: &mut [u8]) {
        Backend::download(self, from, 0, bytes);
    }

    fn host_bytes(buf: &mut B::Buf) -> Option<&mut [u8]> {
        B::host_bytes(buf)
    }

    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<B::Buf>, DeviceError> {
        Backend::alloc_kv(self, layout)
    }

    fn alloc_host_kv(&mut self, layout: KvLayout) -> Result<KvLayer<B::Buf>, DeviceError> {
        Backend::alloc_host_kv(self, layout)
    }

    fn prepare_moe(&mut self, shape: &MoeShape, hidden: usize) -> Result<(), DeviceError> {
        Backend::prepare_moe(self, shape, hidden)
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        Backend::prepare(self, limits)
    }
}

/// Counts what a device of certain sizes would allocate. Its buffers are their sizes in bytes.
pub struct ByteCounter<'a> {
    sizes: &'a dyn DeviceSizes,
    shapes: HeldShapes,
    bytes: usize,
    /// Bytes that buffers take beside their own.
    rest: usize,
}

impl<'a> ByteCounter<'a> {
    /// Creates the counter of a device that has allocated nothing.
    pub fn new(sizes: &'a dyn DeviceSizes) -> ByteCounter<'a> {
        ByteCounter { sizes, shapes: HeldShapes::default(), bytes: 0, rest: 0 }
    }

    fn count(&mut self, bytes: usize) -> usize {
        self.bytes = self.bytes.saturating_add(bytes);
        self.rest = self.rest.saturating_add(self.sizes.buffer_bytes(bytes) - bytes);
        bytes
    }
}

impl LoadTarget for ByteCounter<'_> {
    type Buf = usize;
    const READS_DATA: bool = false;

    fn describe(&self) -> String {
        self.sizes.describe()
    }

    fn threads(&self) -> usize {
        1
    }

    fn allocated_bytes(&self) -> usize {
        self.bytes
    }

    fn driver_bytes(&self) -> usize {
        self.rest.saturating_add(self.sizes.code_bytes(&self.shapes))
    }

    fn activation_type(&self) -> ActivationType {
        self.sizes.activation_type()
    }

    fn alloc(&mut self, bytes: usize) -> Result<usize, DeviceError> {
        Ok(self.count(bytes))
    }

    fn upload(&mut self, _: &mut usize, _: &[u8]) {}

    fn upload_weight(
        &mut self,
        ty: QuantType,
        n: usize,
        k: usize,
        _: &[u8],
    ) -> Result<Weight<usize>, DeviceError> {
        self.shapes.add_weight(ty, k);
        let buf = self.count(self.sizes.packed_layout(ty, n, k).bytes);
        Ok(Weight { id: None, buf, ty, n, k })
    }

    fn prepare_weight(&mut self, ty: QuantType, k: usize) -> Result<(), DeviceError> {
        self.shapes.add_weight(ty, k);
        Ok(())
    }

    fn device_sizes(&self) -> &dyn DeviceSizes {
        self.sizes
    }

    fn download_packed(&mut self, _: &usize, _: &mut [u8]) {}

    fn host_bytes(_: &mut usize) -> Option<&mut [u8]> {
        None
    }

    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<usize>, DeviceError> {
        self.shapes.add_cache(layout);
        let [k, v] = self.sizes.kv_bytes(&layout)?.map(|bytes| self.count(bytes));
        Ok(KvLayer { k, v, layout })
    }

    /// Counts only what attention needs on the device.
    fn alloc_host_kv(&mut self, layout: KvLayout) -> Result<KvLayer<usize>, DeviceError> {
        self.shapes.add_cache(layout);
        let [k, v] = self.sizes.kv_bytes(&layout)?;
        Ok(KvLayer { k, v, layout })
    }

    fn prepare_moe(&mut self, shape: &MoeShape, hidden: usize) -> Result<(), DeviceError> {
        self.shapes.add_mixture(*shape, hidden);
        Ok(())
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        let bytes = self.sizes.step_bytes(limits, &self.shapes);
        self.count(bytes);
        Ok(())
    }
}
