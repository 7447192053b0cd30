// CUDA memory: stream-ordered pools. Compiled against the toolkit's runtime or the emulator's.
#ifdef FBT_CUDA
#include <cuda_runtime_api.h>

#include "tensor/context.h"

namespace fbt::tensor {
namespace {

void check(cudaError_t e, const char* what) {
    if (e != cudaSuccess)
        throw Error(ErrorKind::environment,
                    std::string("CUDA: ") + what + ": " + cudaGetErrorString(e));
}

class CudaMemory : public Memory {
  public:
    CudaMemory() {
        int devices = 0;  // stays 0 where there is no driver: the call then leaves it untouched
        if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
            throw Error(ErrorKind::usage,
                        "no CUDA device found: a driver and a GPU are needed; use --device cpu");
        check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    }
    ~CudaMemory() override {
        (void)cudaStreamSynchronize(stream_);
        (void)cudaStreamDestroy(stream_);
    }
    void* allocate(size_t bytes) override {
        void* p = nullptr;
        if (cudaMallocAsync(&p, bytes, stream_) != cudaSuccess) {
            (void)cudaGetLastError();  // running out is the arena's to handle
            return nullptr;
        }
        return p;
    }
    void release(void* p) override { (void)cudaFreeAsync(p, stream_); }
    void copy_in(void* device, const void* host, size_t n) override {
        if (n == 0) return;
        check(cudaMemcpyAsync(device, host, n, cudaMemcpyHostToDevice, stream_), "copy to device");
        synchronize();  // pageable host memory: the caller may change it at once
    }
    void copy_out(void* host, const void* device, size_t n) override {
        if (n == 0) return;
        check(cudaMemcpyAsync(host, device, n, cudaMemcpyDeviceToHost, stream_), "copy to host");
        synchronize();
    }
    void copy(void* to, const void* from, size_t n) override {
        if (n)
            check(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, stream_), "device copy");
    }
    void zero(void* p, size_t n) override {
        if (n) check(cudaMemsetAsync(p, 0, n, stream_), "memset");
    }
    void synchronize() override { check(cudaStreamSynchronize(stream_), "synchronize"); }
    void* stream() override { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<Memory> make_cuda_memory() { return std::make_unique<CudaMemory>(); }

}  // namespace fbt::tensor
#endif
