// TandemRT's TensorRT plugins as a shared library, for releases from 8.6 on that have IPluginV2DynamicExt.
//
// operators.h is written by library.py: the operators' tensors and launches, and their kernels as PTX. A kernel takes
// the addresses of the inputs, int32 scalars and the addresses of the outputs. Releases before 10 have no int64: there
// such a tensor is one of int32 with a further dimension of 2, the same bytes.
#include <NvInfer.h>
#include <NvInferVersion.h>
#include <cuda.h>
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace nvinfer1;

enum class Kind { LOGITS, FLOAT32, INT32, INT64 };

struct Launch {
    unsigned grid[3];
    unsigned threads;
    std::vector<int32_t> scalars;
};

struct Output {
    Kind kind;
    std::vector<int> axes;  // its dimensions, as axes of the logits
};

struct Kernel {
    char const* name;
    DataType logits;
    char const* ptx;
};

struct Operator {
    char const* name;
    std::vector<Kind> inputs;
    std::vector<Output> outputs;
    Launch (*launch)(int32_t const* logits);
    std::vector<Kernel> kernels;
};

#include "operators.h"

#if NV_TENSORRT_MAJOR >= 10
constexpr bool HAS_INT64 = true;
constexpr DataType LONG = DataType::kINT64;
#else
constexpr bool HAS_INT64 = false;
constexpr DataType LONG = DataType::kINT32;
#endif

DataType type_of(Kind kind, DataType logits) {
    switch (kind) {
        case Kind::LOGITS: return logits;
        case Kind::FLOAT32: return DataType::kFLOAT;
        case Kind::INT32: return DataType::kINT32;
        case Kind::INT64: break;
    }
    return LONG;
}

// The driver that the process has already loaded. So the library links with nothing of CUDA.
struct Driver {
    decltype(&cuCtxGetCurrent) context = nullptr;
    decltype(&cuModuleLoadData) load = nullptr;
    decltype(&cuModuleGetFunction) function = nullptr;
    decltype(&cuLaunchKernel) launch = nullptr;
    bool complete = false;

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        complete = library && find(library, "cuCtxGetCurrent", context) && find(library, "cuModuleLoadData", load) &&
                   find(library, "cuModuleGetFunction", function) && find(library, "cuLaunchKernel", launch);
    }

    template <typename Function>
    static bool find(void* library, char const* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function;
    }
};

Driver const& driver() {
    static Driver const instance;
    return instance;
}

// Returns the kernel in the current context, or null. The first call in a context loads it.
CUfunction loaded(Kernel const& kernel) {
    static std::mutex mutex;
    static std::map<std::pair<CUcontext, Kernel const*>, CUfunction> functions;
    std::lock_guard<std::mutex> lock(mutex);
    CUcontext context = nullptr;
    if (!driver().complete || driver().context(&context) != CUDA_SUCCESS) return nullptr;
    CUfunction& function = functions[{context, &kernel}];
    CUmodule module = nullptr;
    if (!function && driver().load(&module, kernel.ptx) == CUDA_SUCCESS) {
        driver().function(&function, module, kernel.name);
    }
    return function;
}

class Plugin : public IPluginV2DynamicExt {
public:
    explicit Plugin(Operator const& op) : mOperator(op) {}

    char const* getPluginType() const noexcept override { return mOperator.name; }
    char const* getPluginVersion() const noexcept override { return "1"; }
    char const* getPluginNamespace() const noexcept override { return NAMESPACE; }
    void setPluginNamespace(char const*) noexcept override {}
    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(mOperator.outputs.size()); }
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}
    void destroy() noexcept override { delete this; }
    size_t getSerializationSize() const noexcept override { return 0; }
    void serialize(void*) const noexcept override {}
    IPluginV2DynamicExt* clone() const noexcept override { return new Plugin(mOperator); }

    DataType getOutputDataType(int32_t index, DataType const* inputs, int32_t) const noexcept override {
        return type_of(mOperator.outputs[index].kind, inputs[0]);
    }

    DimsExprs getOutputDimensions(int32_t index, DimsExprs const* inputs, int32_t,
                                  IExprBuilder& builder) noexcept override {
        DimsExprs dims{};
        for (int axis : mOperator.outputs[index].axes) dims.d[dims.nbDims++] = inputs[0].d[axis];
        if (mOperator.outputs[index].kind == Kind::INT64 && !HAS_INT64) dims.d[dims.nbDims++] = builder.constant(2);
        return dims;
    }

    bool supportsFormatCombination(int32_t position, PluginTensorDesc const* tensors, int32_t inputs,
                                   int32_t) noexcept override {
        if (tensors[position].format != TensorFormat::kLINEAR || !kernel_for(tensors[0].type)) return false;
        Kind const kind = position < inputs ? mOperator.inputs[position] : mOperator.outputs[position - inputs].kind;
        return tensors[position].type == type_of(kind, tensors[0].type);
    }

    void configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                         int32_t) noexcept override {}

    size_t getWorkspaceSize(PluginTensorDesc const*, int32_t, PluginTensorDesc const*,
                            int32_t) const noexcept override {
        return 0;
    }

    int32_t enqueue(PluginTensorDesc const* tensors, PluginTensorDesc const*, void const* const* inputs,
                    void* const* outputs, void*, cudaStream_t stream) noexcept override {
        Kernel const* kernel = kernel_for(tensors[0].type);
        CUfunction const function = kernel ? loaded(*kernel) : nullptr;
        if (!function) return 1;
        int32_t const logits[] = {static_cast<int32_t>(tensors[0].dims.d[0]),
                                  static_cast<int32_t>(tensors[0].dims.d[1]),
                                  static_cast<int32_t>(tensors[0].dims.d[2])};
        Launch launch = mOperator.launch(logits);
        std::vector<void*> arguments;
        for (size_t i = 0; i < mOperator.inputs.size(); ++i) arguments.push_back(const_cast<void const**>(&inputs[i]));
        for (int32_t& scalar : launch.scalars) arguments.push_back(&scalar);
        for (size_t i = 0; i < mOperator.outputs.size(); ++i) arguments.push_back(const_cast<void**>(&outputs[i]));
        return driver().launch(function, launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, 1, 1, 0,
                               stream, arguments.data(), nullptr);
    }

private:
    Kernel const* kernel_for(DataType logits) const {
        for (Kernel const& kernel : mOperator.kernels) {
            if (kernel.logits == logits) return &kernel;
        }
        return nullptr;
    }

    Operator const& mOperator;
};

class Creator : public IPluginCreator {
public:
    explicit Creator(Operator const& op) : mOperator(op) {}

    char const* getPluginName() const noexcept override { return mOperator.name; }
    char const* getPluginVersion() const noexcept override { return "1"; }
    char const* getPluginNamespace() const noexcept override { return NAMESPACE; }
    void setPluginNamespace(char const*) noexcept override {}
    PluginFieldCollection const* getFieldNames() noexcept override { return &mNoFields; }

    IPluginV2* createPlugin(char const*, PluginFieldCollection const*) noexcept override {
        return new Plugin(mOperator);
    }

    IPluginV2* deserializePlugin(char const*, void const*, size_t) noexcept override { return new Plugin(mOperator); }

private:
    Operator const& mOperator;
    PluginFieldCollection mNoFields{0, nullptr};
};

}  // namespace

// TensorRT calls both when it loads the library, which a version-compatible plan may contain.
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

EXPORTED nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count) {
    static std::vector<IPluginCreator*> const creators = [] {
        std::vector<IPluginCreator*> all;
        for (Operator const& op : OPERATORS) all.push_back(new Creator(op));
        return all;
    }();
    count = static_cast<int32_t>(creators.size());
    return creators.data();
}
