// The functions of the library and the structs they take. Python packs the same structs field by field.
#pragma once
#include <cstdint>

struct TensorRef {  // a tensor (batch heads length width) with a contiguous last axis; strides in elements
    char* data;
    long batch, head, row;
};

// ------------------------------------------------------------------------------------------ softmax attention
struct TilePart {  // the tiles for one order of the tokens
    long n, m;
    const long *q_order, *k_order;  // nullptr: natural order
    long rows;
    const long* row_starts;         // (rows + 1): where the tiles of each row begin in the next two arrays
    const int *columns, *mask_ids;  // mask id 1: a full tile
    const uint64_t* masks;          // (masks 64): for each key of a tile, one bit per query
};

struct AttentionArgs {
    long batch, heads, kv_heads, keys, width, threads;  // query head h reads key head h / (heads / kv_heads)
    double scale;
    TensorRef q, k, v, out, lse;  // lse.data is nullptr if there is one part and no backward pass
    const uint8_t* key_mask;      // (batch keys): padding mask, nonzero = keep; nullptr: no padding
    TensorRef pair_mask;          // (batch heads queries keys) bytes, nonzero = keep; data is nullptr if there is none
    long parts;
    const TilePart* part;
};

struct AttentionGrads {
    TensorRef out, q, k, v;
};

// ------------------------------------------------------------------------------------------ linear attention
struct LinearArgs {  // widths are multiples of the vector length
    long batch, heads, n, keys, rank, width, threads;
    TensorRef q, k, v, out, normalizer;  // (b h n .); normalizer (b h n 1)
    TensorRef state, sum, after, total;  // S and z before the first token, and after the last: (b h rank width), (b h 1 rank)
};

struct LinearGrads {
    TensorRef out, normalizer, state, sum;      // inputs: gradients of out, normalizer and the final S and z
    TensorRef q, k, v, first_state, first_sum;  // outputs: gradients of q, k, v and the initial S and z
};

// ------------------------------------------------------------------------------------------ elu(x) + 1 and clusters
struct EluArgs {  // tensors (batch heads n width)
    long batch, heads, n, width, threads;
    long shift_negative;  // whether the maximum of a row that is negative everywhere is subtracted first
    TensorRef x, y, out;  // forward: x -> out; backward: y = phi(x) and x = the gradient of it -> out
};

struct ClusterArgs {
    long batch, heads, n, bits, clusters, iterations, threads;
    const char* x;        // (batch heads n bits): bit = (x >= 0)
    const uint8_t* mask;  // (batch n): padding mask, nonzero = keep; nullptr: no padding
    const long* first;    // (batch heads clusters): tokens that are the initial centres
    long* nearest;        // (batch heads n)
};

// Runs body(data) on several threads at once, and returns when all have ended: the signature of GOMP_parallel in OpenMP runtimes.
using ThreadTeam = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

extern "C" {
void attention_forward_float(const AttentionArgs*);
void attention_forward_double(const AttentionArgs*);
void attention_backward_float(const AttentionArgs*, const AttentionGrads*);
void attention_backward_double(const AttentionArgs*, const AttentionGrads*);

void linear_forward_float(const LinearArgs*);
void linear_forward_double(const LinearArgs*);
void linear_backward_float(const LinearArgs*, const LinearGrads*);
void linear_backward_double(const LinearArgs*, const LinearGrads*);
void linear_all_forward_float(const LinearArgs*);
void linear_all_forward_double(const LinearArgs*);
void linear_all_backward_float(const LinearArgs*, const LinearGrads*);
void linear_all_backward_double(const LinearArgs*, const LinearGrads*);

void elu_forward_float(const EluArgs*);
void elu_forward_double(const EluArgs*);
void elu_backward_float(const EluArgs*);
void elu_backward_double(const EluArgs*);

void cluster_float(const ClusterArgs*);
void cluster_double(const ClusterArgs*);

void advise_huge_pages(char* data, long bytes);
void set_thread_team(ThreadTeam team);
}
