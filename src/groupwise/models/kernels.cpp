// What rollouts and updates compute in float32 on a CPU; attention in bfloat16 too.
//
// kernels.py compiles this file for the processor that is there, and says what each function means.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <omp.h>
#include <utility>
#include <vector>

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;             // numbers of a vector; `dim` is a multiple of it
constexpr int TALL = 8;               // most rows of a tile
constexpr int PANEL = 2 * LANES;      // columns of a tile
constexpr int64_t BLOCK = 128;        // rows that stay in the second-level cache
constexpr int64_t PACK = 64;          // rows that are packed into it
constexpr int64_t ASKED = 32;         // queries that are attended at once
constexpr int64_t AHEAD = 16;         // keys that are fetched before they are needed
constexpr int64_t SMALL = 1 << 14;    // fewer numbers are not worth a second thread

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float Half __attribute__((vector_size(2 * LANES), aligned(4)));
typedef float Quarter __attribute__((vector_size(LANES), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

INLINE Vector &at(float *place) { return *(Vector *)place; }
INLINE const Vector &at(const float *place) { return *(const Vector *)place; }

INLINE float sum(Vector x)
{
    Half h = *(Half *)&x + *((Half *)&x + 1);
    Quarter q = *(Quarter *)&h + *((Quarter *)&h + 1);
    return (q[0] + q[1]) + (q[2] + q[3]);
}

// e^x to 2e-7 of it, where x is beyond -87 or 88 that of -87 or 88. As 2^n · e^r with
// |r| <= ln 2 / 2, where adding 1.5 · 2^23 rounds to the nearest integer and leaves it in the last
// bits; 127 more make it the exponent of 2^n. A NaN stays one, whatever its last bits are.
INLINE Vector exponential(Vector x)
{
    const Vector least = Vector{} - 87.0f, most = Vector{} + 88.0f;
    const float shift = 12582912.0f + 127.0f;
    x = x < least ? least : x;
    x = x > most ? most : x;
    Vector n = x * 1.44269504f + shift;
    const Vector power = (Vector)((Integers)n << 23);
    n -= shift;
    Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    Vector p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return p * power;
}

// Numbers of one vector whose place has the bit SIZE change with those of another one that lack it.
template <int SIZE>
INLINE void change(Vector &low, Vector &high)
{
    Integers first, second;
    for (int i = 0; i < LANES; i++) {
        first[i] = i & SIZE ? LANES + i - SIZE : i;
        second[i] = i & SIZE ? LANES + i : i + SIZE;
    }
    const Vector kept = low;
    low = __builtin_shuffle(kept, high, first);
    high = __builtin_shuffle(kept, high, second);
}

template <int SIZE>
INLINE void change_all(Vector *rows)
{
    for (int i = 0; i < LANES; i++)
        if (!(i & SIZE))
            change<SIZE>(rows[i], rows[i + SIZE]);
}

// to(k, j) = from(j, k), where rows begin so many numbers apart
void transpose(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
               int64_t to_row)
{
    const int64_t whole = rows / LANES * LANES;
    for (int64_t k = 0; k < columns; k += LANES)
        for (int64_t j = 0; j < rows; j += LANES)
            if (k + LANES <= columns && j < whole) {
                Vector block[LANES];
                for (int i = 0; i < LANES; i++)
                    block[i] = at(from + (j + i) * from_row + k);
                change_all<1>(block), change_all<2>(block);
                change_all<4>(block), change_all<8>(block);
                for (int i = 0; i < LANES; i++)
                    at(to + (k + i) * to_row + j) = block[i];
            } else
                for (int64_t i = j; i < std::min(j + LANES, rows); i++)
                    for (int64_t l = k; l < std::min(k + LANES, columns); l++)
                        to[l * to_row + i] = from[i * from_row + l];
}

// left(i, k) = data[i · row + k · step]
struct Left {
    const float *data;
    int64_t row, step;
};

// out[ROWS, 16 · VECTORS] += left[ROWS, depth] · right[depth, 16 · VECTORS]
template <int ROWS, int VECTORS>
INLINE void tile(Left left, int64_t depth, const float *right, int64_t right_row, float *out,
                 int64_t out_row)
{
    Vector total[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECTORS; v++)
            total[i][v] = at(out + i * out_row + v * LANES);
    for (int64_t k = 0; k < depth; k++)
        for (int v = 0; v < VECTORS; v++) {
            const Vector some = at(right + k * right_row + v * LANES);
            for (int i = 0; i < ROWS; i++)
                total[i][v] += left.data[i * left.row + k * left.step] * some;
        }
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECTORS; v++)
            at(out + i * out_row + v * LANES) = total[i][v];
}

template <int VECTORS>
INLINE void strip(int64_t rows, Left left, int64_t depth, const float *right, int64_t right_row,
                  float *out, int64_t out_row)
{
    for (; rows >= TALL; rows -= TALL, left.data += TALL * left.row, out += TALL * out_row)
        tile<TALL, VECTORS>(left, depth, right, right_row, out, out_row);
    for (; rows >= 2; rows -= 2, left.data += 2 * left.row, out += 2 * out_row)
        tile<2, VECTORS>(left, depth, right, right_row, out, out_row);
    if (rows)
        tile<1, VECTORS>(left, depth, right, right_row, out, out_row);
}

// out[rows, columns] += left[rows, depth] · right[depth, columns]; columns a multiple of 16
void multiply(int64_t rows, int64_t columns, int64_t depth, Left left, const float *right,
              int64_t right_row, float *out, int64_t out_row)
{
    int64_t j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        strip<2>(rows, left, depth, right + j, right_row, out + j, out_row);
    if (j < columns)
        strip<1>(rows, left, depth, right + j, right_row, out + j, out_row);
}

typedef uint16_t Narrow;  // bfloat16: the upper half of a float32

INLINE float wide(float x) { return x; }
INLINE float wide(Narrow x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE void put(float x, float &place) { place = x; }
INLINE void put(float x, Narrow &place)  // to the nearest, of two as near the even one
{
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    place = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// Numbers as float32: where they are, or copied to a room.
INLINE const float *widened(const float *from, int64_t, float *) { return from; }
INLINE const float *widened(const Narrow *from, int64_t size, float *room)
{
    for (int64_t i = 0; i < size; i++)
        room[i] = wide(from[i]);
    return room;
}

// Of every row and head `dim` numbers that lie together.
template <typename Number>
struct Heads {
    const Number *data;
    int64_t row, head;
    const Number *of(int64_t r, int64_t h) const { return data + r * row + h * head; }
};

}  // namespace

template <typename Number>
struct Attention {
    Heads<Number> query, key, value;
    Number *out;                              // [rows, heads, dim]
    const Number *prompt_key, *prompt_value;  // [slots, key_heads, prompt_capacity, dim]
    Number *suffix_key, *suffix_value;        // [slots, key_heads, group, suffix_capacity, dim]
    const int64_t *slot, *sample, *time;      // [rows], in the order of slots
    const int64_t *prompt_length;             // [slots]
    int64_t rows, heads, key_heads, dim, group, prompt_capacity, suffix_capacity;
    int64_t window;  // the last tokens that are seen, or 0 for all
    int64_t threads;
    double scaling;
};

namespace {

// The rows of one slot, with one key head: what they see, and room to compute it.
//
// Queries are the rows times the heads that share the key head. For the prompt they are the columns
// of a matrix, so that a tile of scores is a few keys by 32 queries.
template <typename Number>
struct Share {
    const Attention<Number> &a;
    int64_t first, rows, repeats, queries, columns;  // columns: queries up to a multiple of 16
    int64_t hidden_prompt, hidden_suffix;            // tokens before the window
    int64_t prompt, suffix, width;  // tokens in it; width: suffix up to a multiple of 16
    int64_t key_head, cell;
    float *asked;                 // [queries, dim], scaled
    float *turned;                // [dim, columns]
    float *to_prompt;             // [prompt, columns]
    float *to_suffix;             // [queries, width]
    float *top, *total, *result;  // [columns], [columns], [queries, dim]
    float *copy;                  // keys or values in float32

    Share(const Attention<Number> &a, int64_t begin, int64_t end)
        : a(a), first(begin), rows(end - begin), repeats(a.heads / a.key_heads)
    {
        const int64_t length = a.prompt_length[a.slot[begin]], own = a.time[begin] + 1;
        const int64_t hidden = a.window ? std::max<int64_t>(0, length + own - a.window) : 0;
        queries = rows * repeats;
        columns = (queries + LANES - 1) / LANES * LANES;
        hidden_prompt = std::min(hidden, length), hidden_suffix = hidden - hidden_prompt;
        prompt = length - hidden_prompt, suffix = own - hidden_suffix;
        width = (suffix + LANES - 1) / LANES * LANES;
    }

    // Divides a room, if there is one yet, among what is computed for a key head; returns its size.
    int64_t take(float *room, int64_t head)
    {
        key_head = head, cell = a.slot[first] * a.key_heads + head;
        int64_t size = 0;
        const auto part = [&](int64_t numbers) {
            const int64_t start = std::exchange(size, size + numbers);
            return room ? room + start : nullptr;
        };
        asked = part(queries * a.dim), turned = part(columns * a.dim);
        to_prompt = part(columns * prompt), to_suffix = part(queries * width);
        top = part(columns), total = part(columns), result = part(queries * a.dim);
        copy = part(sizeof(Number) < sizeof(float) ? std::max(prompt, suffix) * a.dim : 0);
        return size;
    }

    int64_t of_prompt() const { return (cell * a.prompt_capacity + hidden_prompt) * a.dim; }

    int64_t of_suffix(int64_t row) const
    {
        return (cell * a.group + a.sample[row]) * a.suffix_capacity * a.dim;
    }

    void score_prompt()
    {
        std::fill(turned, to_suffix, 0.0f);
        for (int64_t q = 0; q < queries; q++) {
            const Number *query = a.query.of(first + q / repeats, key_head * repeats + q % repeats);
            for (int64_t d = 0; d < a.dim; d++) {
                asked[q * a.dim + d] = wide(query[d]) * (float)a.scaling;
                turned[d * columns + q] = asked[q * a.dim + d];
            }
        }
        const float *key = widened(a.prompt_key + of_prompt(), prompt * a.dim, copy);
        multiply(prompt, columns, a.dim, {key, a.dim, 1}, turned, columns, to_prompt, columns);
        std::fill(top, total, -std::numeric_limits<float>::infinity());
        for (int64_t t = 0; t < prompt; t++)
            for (int64_t q = 0; q < columns; q += LANES) {
                const Vector x = at(to_prompt + t * columns + q), most = at(top + q);
                at(top + q) = x > most ? x : most;
            }
    }

    // Notes the new keys and values first.
    void score_suffix()
    {
        for (int64_t r = 0; r < rows; r++) {
            const int64_t begin = of_suffix(first + r), last = begin + a.time[first + r] * a.dim;
            const int64_t start = begin + hidden_suffix * a.dim;
            std::memcpy(a.suffix_key + last, a.key.of(first + r, key_head), sizeof(Number) * a.dim);
            std::memcpy(a.suffix_value + last, a.value.of(first + r, key_head),
                        sizeof(Number) * a.dim);
            const float *keys = widened(a.suffix_key + start, suffix * a.dim, copy);
            for (int64_t t = 0; t < suffix; t++) {
                const float *key = keys + t * a.dim;
                for (int64_t d = 0; d < a.dim; d += LANES) {
                    __builtin_prefetch(key + AHEAD * a.dim + d);
                    __builtin_prefetch(a.suffix_value + start + t * a.dim + d);
                }
                for (int64_t q = r * repeats; q < (r + 1) * repeats; q++) {
                    Vector product{};
                    for (int64_t d = 0; d < a.dim; d += LANES)
                        product += at(asked + q * a.dim + d) * at(key + d);
                    const float x = sum(product);
                    to_suffix[q * width + t] = x;
                    top[q] = x > top[q] ? x : top[q];
                }
            }
            for (int64_t q = r * repeats; q < (r + 1) * repeats; q++)
                std::fill(to_suffix + q * width + suffix, to_suffix + (q + 1) * width,
                          -std::numeric_limits<float>::infinity());
        }
    }

    // Scores become weights, which are divided by their sum at the end.
    void weigh()
    {
        std::fill(total, total + columns, 0.0f);
        for (int64_t t = 0; t < prompt; t++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(to_prompt + t * columns + q);
                x = exponential(x - at(top + q));
                at(total + q) += x;
            }
        for (int64_t q = 0; q < queries; q++) {
            Vector more{};
            for (int64_t t = 0; t < width; t += LANES) {
                Vector &x = at(to_suffix + q * width + t);
                x = exponential(x - top[q]);
                more += x;
            }
            total[q] += sum(more);
        }
    }

    void choose()
    {
        const int64_t dim = a.dim;
        std::fill(result, result + queries * dim, 0.0f);
        const float *seen = widened(a.prompt_value + of_prompt(), prompt * dim, copy);
        multiply(queries, dim, prompt, {to_prompt, 1, columns}, seen, dim, result, dim);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t q = r * repeats, start = of_suffix(first + r) + hidden_suffix * dim;
            const float *own = widened(a.suffix_value + start, suffix * dim, copy);
            multiply(repeats, dim, suffix, {to_suffix + q * width, width, 1}, own, dim,
                     result + q * dim, dim);
            Number *out = a.out + ((first + r) * a.heads + key_head * repeats) * dim;
            for (int64_t h = 0; h < repeats; h++)
                for (int64_t d = 0; d < dim; d++)
                    put(result[(q + h) * dim + d] / total[q + h], out[h * dim + d]);
        }
    }
};

template <typename Number>
int attend(const Attention<Number> &a)
{
    std::vector<Share<Number>> shares;
    int64_t most = 0;
    for (int64_t begin = 0, end = 0; begin < a.rows; begin = end) {
        while (end < a.rows && a.slot[end] == a.slot[begin])
            end++;
        shares.emplace_back(a, begin, end);
        most = std::max(most, shares.back().take(nullptr, 0));
    }
    most = (most + LANES - 1) / LANES * LANES;
    float *room = (float *)std::aligned_alloc(4 * LANES, sizeof(float) * most * a.threads);
    if (!room)
        return 1;
    const int64_t units = shares.size() * a.key_heads;
#pragma omp parallel num_threads(a.threads)
    {
        float *mine = room + most * omp_get_thread_num();
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < units; i++) {
            Share<Number> share = shares[i / a.key_heads];
            share.take(mine, i % a.key_heads);
            share.score_prompt();
            share.score_suffix();
            share.weigh();
            share.choose();
        }
    }
    std::free(room);
    return 0;
}

}  // namespace

// Packed groups: spans of tokens, each a prompt, or a completion that sees the prompt and itself.
struct Tree {
    Heads<float> query, key, value;
    float *out;             // [tokens, heads, dim]
    float *norm;            // [tokens, heads]: the logarithm of what divides the weights
    const float *out_grad;  // [tokens, heads, dim]
    float *query_grad;      // [tokens, heads, dim]
    float *key_grad, *value_grad;           // [parts, tokens, key_heads, dim], to be added to
    const int64_t *begin, *length, *owner;  // [spans]; owner: the span of the prompt, or -1
    int64_t spans, tokens, heads, key_heads, dim;
    int64_t window;  // the last tokens that are seen, or 0 for all
    int64_t parts, threads;
    double scaling;
};

namespace {

// Some queries of one span, with one head. What they see lies in two places: the prompt and the
// span itself. Queries are the columns of a matrix, as they are in `Share`.
struct Asked {
    struct Seen {
        int64_t token, size, position;  // the first key, how many, and where the first one stands
    };

    const Tree &t;
    int64_t head, key_head, token, count, columns, position, keys;
    Seen seen[2];

    Asked(const Tree &t, int64_t span, int64_t first, int64_t head)
        : t(t), head(head), key_head(head / (t.heads / t.key_heads)), token(t.begin[span] + first),
          count(std::min(ASKED, t.length[span] - first)),
          columns((count + LANES - 1) / LANES * LANES)
    {
        const int64_t owner = t.owner[span], prompt = owner < 0 ? 0 : t.length[owner];
        position = prompt + first;
        const int64_t hidden = t.window ? std::max<int64_t>(0, position + 1 - t.window) : 0;
        const int64_t of_prompt = std::min(hidden, prompt), own = hidden - of_prompt;
        seen[0] = {owner < 0 ? 0 : t.begin[owner] + of_prompt, prompt - of_prompt, of_prompt};
        seen[1] = {t.begin[span] + own, first + count - own, prompt + own};
        keys = seen[0].size + seen[1].size;
    }

    // The queries' rows of [tokens, heads, dim] where they are, and of anything like it.
    int64_t place(int64_t q) const { return ((token + q) * t.heads + head) * t.dim; }

    void turn(const float *rows, int64_t row, float *turned) const
    {
        if (count < columns)
            std::fill(turned, turned + t.dim * columns, 0.0f);
        transpose(rows, row, count, t.dim, turned, columns);
    }

    // scores[keys, columns] = rows[keys, dim] · turned[dim, columns]
    void compare(const Heads<float> &rows, const float *turned, float *scores) const
    {
        std::fill(scores, scores + keys * columns, 0.0f);
        for (const Seen &s : seen) {
            multiply(s.size, columns, t.dim, {rows.of(s.token, key_head), rows.row, 1}, turned,
                     columns, scores, columns);
            scores += s.size * columns;
        }
    }

    // out[count, dim] = weights[keys, count]ᵀ · rows[keys, dim]
    void choose(const Heads<float> &rows, const float *weights, float *out) const
    {
        for (int64_t q = 0; q < count; q++)
            std::fill(out + q * t.heads * t.dim, out + q * t.heads * t.dim + t.dim, 0.0f);
        for (const Seen &s : seen) {
            multiply(count, t.dim, s.size, {weights, 1, columns}, rows.of(s.token, key_head),
                     rows.row, out, t.heads * t.dim);
            weights += s.size * columns;
        }
    }

    // grad[keys, dim] += weights[keys, count] · rows[count, dim], of every key where it belongs
    void spread(const float *weights, const float *rows, int64_t row, float *grad) const
    {
        for (const Seen &s : seen) {
            multiply(s.size, t.dim, count, {weights, columns, 1}, rows, row,
                     grad + (s.token * t.key_heads + key_head) * t.dim, t.key_heads * t.dim);
            weights += s.size * columns;
        }
    }

    // Sets what a query does not see: later keys, and those before its window.
    void hide(float *scores, float value) const
    {
        for (const Seen &s : seen)
            for (int64_t k = s.position; k < s.position + s.size; k++, scores += columns) {
                const int64_t end = t.window ? k + t.window - position : columns;
                if (k > position)
                    std::fill(scores, scores + (k - position), value);
                if (end < columns)
                    std::fill(scores + end, scores + columns, value);
            }
    }

    int64_t room() const { return 2 * columns * (keys + t.dim) + 2 * columns; }

    void forward(float *room) const
    {
        float *turned = room, *scores = turned + t.dim * columns;
        float *top = scores + keys * columns, *total = top + columns;
        turn(t.query.of(token, head), t.query.row, turned);
        compare(t.key, turned, scores);
        hide(scores, -std::numeric_limits<float>::infinity());
        const float scaling = t.scaling;
        for (int64_t q = 0; q < columns; q += LANES) {
            Vector most = Vector{} - std::numeric_limits<float>::infinity(), sum{};
            for (int64_t k = 0; k < keys; k++) {
                const Vector x = at(scores + k * columns + q) * scaling;
                most = x > most ? x : most;
            }
            for (int64_t k = 0; k < keys; k++) {
                Vector &x = at(scores + k * columns + q);
                x = exponential(x * scaling - most);
                sum += x;
            }
            at(top + q) = most, at(total + q) = sum;
        }
        hide(scores, 0.0f);
        choose(t.value, scores, t.out + place(0));
        for (int64_t q = 0; q < count; q++) {
            t.norm[(token + q) * t.heads + head] = top[q] + std::log(total[q]);
            for (int64_t d = 0; d < t.dim; d++)
                t.out[place(q) + d] /= total[q];
        }
    }

    //   P = exp(QKᵀ · scaling - norm),  dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)) · scaling,
    //   dQ = dS K,  dK = dSᵀ Q
    void backward(float *room, int64_t part) const
    {
        float *turned = room, *weights = turned + t.dim * columns;
        float *grads = weights + keys * columns, *turned_grad = grads + keys * columns;
        float *norm = turned_grad + t.dim * columns, *mean = norm + columns;
        const float *query = t.query.of(token, head), *out_grad = t.out_grad + place(0);
        const int64_t row = t.heads * t.dim, whole = t.tokens * t.key_heads * t.dim;
        turn(query, t.query.row, turned);
        compare(t.key, turned, weights);
        turn(out_grad, row, turned_grad);
        compare(t.value, turned_grad, grads);
        std::fill(norm, mean + columns, 0.0f);
        for (int64_t q = 0; q < count; q++) {
            norm[q] = t.norm[(token + q) * t.heads + head];
            for (int64_t d = 0; d < t.dim; d++)
                mean[q] += t.out[place(q) + d] * out_grad[q * row + d];
        }
        const float scaling = t.scaling;
        for (int64_t k = 0; k < keys; k++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(weights + k * columns + q);
                x = exponential(x * scaling - at(norm + q));
            }
        hide(weights, 0.0f);
        spread(weights, out_grad, row, t.value_grad + part * whole);
        for (int64_t k = 0; k < keys; k++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(weights + k * columns + q);
                x *= (at(grads + k * columns + q) - at(mean + q)) * scaling;
            }
        choose(t.key, weights, t.query_grad + place(0));
        spread(weights, query, t.query.row, t.key_grad + part * whole);
    }
};

// Everything that every thread needs to attend, or null where there is no memory.
float *tree_room(const Tree &t, int64_t &each)
{
    each = 0;
    for (int64_t s = 0; s < t.spans; s++)
        for (int64_t first = 0; first < t.length[s]; first += ASKED)
            each = std::max(each, Asked(t, s, first, 0).room());
    each = (each + LANES - 1) / LANES * LANES;
    return (float *)std::aligned_alloc(4 * LANES, sizeof(float) * std::max<int64_t>(each, LANES) *
                                                      t.threads);
}

INLINE void normalise(const float *x, const float *weight, int64_t size, float eps, float *out)
{
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++)
        squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / size + eps);
    for (int64_t i = 0; i < size; i++)
        out[i] = x[i] * scale * weight[i];
}

// What is less than e^-87 of the largest is nothing.
INLINE Vector power(Vector x)
{
    const Vector result = exponential(x);
    return x < -87.0f ? Vector{} : result;
}

// Softmax of a row in place; returns the logarithm of the sum. Sums of more than a block are taken
// in float64.
float soften(float *x, int64_t size)
{
    const float lowest = -std::numeric_limits<float>::infinity();
    const int64_t whole = size / LANES * LANES;
    Vector last = Vector{} + lowest, most = last;
    std::memcpy(&last, x + whole, sizeof(float) * (size - whole));
    for (int64_t i = 0; i < whole; i += LANES)
        most = at(x + i) > most ? at(x + i) : most;
    most = last > most ? last : most;
    float top = lowest;
    for (int i = 0; i < LANES; i++)
        top = most[i] > top ? most[i] : top;
    last = power(last - top);
    double total = sum(last);
    for (int64_t start = 0; start < whole; start += BLOCK) {
        Vector some{};
        for (int64_t i = start; i < std::min(start + BLOCK, whole); i += LANES)
            some += at(x + i) = power(at(x + i) - top);
        total += sum(some);
    }
    std::memcpy(x + whole, &last, sizeof(float) * (size - whole));
    const float scale = 1.0 / total;
    for (int64_t i = 0; i < size; i++)
        x[i] *= scale;
    return top + std::log(total);
}

}  // namespace

struct Linear {
    const float *x;       // [rows, depth]
    const float *weight;  // [panels, depth, 32]; of a gated one 16 of the gate, then 16 others
    const float *bias;    // [panels, 32]
    const float *onto;    // [rows, columns] to be added, or null
    float *out;           // [rows, columns]
    int64_t rows, depth, columns, gated, threads;
};

namespace {

// Some rows of one panel: a tile is computed on the stack, and leaves it finished.
void linear_panel(const Linear &l, int64_t panel, int64_t first, int64_t end)
{
    const int64_t wide = l.gated ? LANES : PANEL, column = panel * wide;
    const int64_t columns = std::min(wide, l.columns - column);
    const float *weight = l.weight + panel * l.depth * PANEL;
    alignas(4 * LANES) float block[TALL][PANEL];
    for (int64_t row = first; row < end; row += TALL) {
        const int64_t rows = std::min<int64_t>(TALL, end - row);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < PANEL; j++)
                block[i][j] = l.bias[panel * PANEL + j];
        strip<2>(rows, {l.x + row * l.depth, l.depth, 1}, l.depth, weight, PANEL, block[0], PANEL);
        for (int64_t i = 0; i < rows; i++) {
            if (l.gated) {
                const Vector gate = at(block[i]);
                at(block[i]) = gate / (exponential(-gate) + 1.0f) * at(block[i] + LANES);
            }
            const int64_t place = (row + i) * l.columns + column;
            for (int64_t j = 0; j < columns; j++)
                l.out[place + j] = block[i][j] + (l.onto ? l.onto[place + j] : 0.0f);
        }
    }
}

}  // namespace

// out = left · right, or added to it, where left(i, k) = left[i · left_row + k · left_step] and
// right(k, j) = right[k · right_row + j · right_step].
struct Product {
    const float *left, *right;
    float *out;  // [rows, columns]
    int64_t rows, columns, depth, left_row, left_step, right_row, right_step, onto, threads;
};

namespace {

// Some rows or columns of a factor as [depth, WIDTH], zeros after the last of them:
// packed(k, j) = from[j · step + k · deep].
template <int WIDTH>
void pack(const float *from, int64_t size, int64_t step, int64_t deep, int64_t depth, float *packed)
{
    size = std::min<int64_t>(size, WIDTH);
    if (size < WIDTH)
        std::fill(packed, packed + depth * WIDTH, 0.0f);
    if (deep == 1)
        transpose(from, step, size, depth, packed, WIDTH);
    else
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = 0; j < size; j++)
                packed[k * WIDTH + j] = from[k * deep + j * step];
}

// Some columns of the right factor, as [depth, 32].
void pack_right(const Product &p, int64_t column, float *panel)
{
    pack<PANEL>(p.right + column * p.right_step, p.columns - column, p.right_step, p.right_row,
                p.depth, panel);
}

// Some rows of the left factor, as [depth, 8].
void pack_left(const Product &p, int64_t row, float *packed)
{
    pack<TALL>(p.left + row * p.left_row, p.rows - row, p.left_row, p.left_step, p.depth, packed);
}

// A tile of the result, from where the left factor's rows are and a packed panel.
INLINE void finish(const Product &p, int64_t row, int64_t column, Left left, const float *panel)
{
    const int64_t rows = std::min<int64_t>(TALL, p.rows - row);
    const int64_t columns = std::min<int64_t>(PANEL, p.columns - column);
    float *out = p.out + row * p.columns + column;
    alignas(4 * LANES) float block[TALL][PANEL] = {};
    if (p.onto)
        for (int64_t i = 0; i < rows; i++)
            std::memcpy(block[i], out + i * p.columns, sizeof(float) * columns);
    strip<2>(rows, left, p.depth, panel, PANEL, block[0], PANEL);
    for (int64_t i = 0; i < rows; i++)
        std::memcpy(out + i * p.columns, block[i], sizeof(float) * columns);
}

// Every thread packs a panel and takes it to all rows, which are packed before, or lie well.
void by_panels(const Product &p, float *whole, float *panel)
{
    const bool as_it_is = p.left_step == 1;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < (as_it_is ? 0 : p.rows); row += TALL)
        pack_left(p, row, whole + row * p.depth);
#pragma omp for schedule(dynamic)
    for (int64_t column = 0; column < p.columns; column += PANEL) {
        pack_right(p, column, panel);
        for (int64_t row = 0; row < p.rows; row += TALL)
            finish(p, row, column,
                   as_it_is ? Left{p.left + row * p.left_row, p.left_row, 1}
                            : Left{whole + row * p.depth, 1, TALL},
                   panel);
    }
}

// Every thread packs some rows and takes them to all panels, which are packed before.
void by_rows(const Product &p, float *whole, float *rows)
{
#pragma omp for schedule(static)
    for (int64_t column = 0; column < p.columns; column += PANEL)
        pack_right(p, column, whole + column * p.depth);
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < p.rows; first += PACK) {
        const int64_t end = std::min(first + PACK, p.rows);
        for (int64_t row = first; row < end; row += TALL)
            pack_left(p, row, rows + (row - first) * p.depth);
        for (int64_t column = 0; column < p.columns; column += PANEL)
            for (int64_t row = first; row < end; row += TALL)
                finish(p, row, column, {rows + (row - first) * p.depth, 1, TALL},
                       whole + column * p.depth);
    }
}

}  // namespace

extern "C" {

// 0, or 1 where there was no memory.
int attend_float32(const Attention<float> *given) { return attend(*given); }
int attend_bfloat16(const Attention<Narrow> *given) { return attend(*given); }

// 0, or 1 where there was no memory.
int tree_forward(const Tree *given)
{
    const Tree &t = *given;
    int64_t each;
    float *room = tree_room(t, each);
    if (!room)
        return 1;
#pragma omp parallel for num_threads(t.threads) schedule(dynamic) collapse(2)
    for (int64_t s = 0; s < t.spans; s++)
        for (int64_t h = 0; h < t.heads; h++)
            for (int64_t first = 0; first < t.length[s]; first += ASKED)
                Asked(t, s, first, h).forward(room + each * omp_get_thread_num());
    std::free(room);
    return 0;
}

// 0, or 1 where there was no memory. No two threads add to the same keys: each takes one head of
// keys and, of a prompt, one part of its completions; the prompt itself goes with the first part.
int tree_backward(const Tree *given)
{
    const Tree &t = *given;
    const int64_t repeats = t.heads / t.key_heads;
    int64_t each;
    float *room = tree_room(t, each);
    if (!room)
        return 1;
#pragma omp parallel for num_threads(t.threads) schedule(dynamic) collapse(3)
    for (int64_t prompt = 0; prompt < t.spans; prompt++)
        for (int64_t part = 0; part < t.parts; part++)
            for (int64_t head = 0; head < t.key_heads; head++) {
                if (t.owner[prompt] >= 0)
                    continue;
                int64_t turn = 0;
                for (int64_t s = 0; s < t.spans; s++) {
                    if (s != prompt && t.owner[s] != prompt)
                        continue;
                    if ((s == prompt ? 0 : turn++ % t.parts) != part)
                        continue;
                    for (int64_t h = head * repeats; h < (head + 1) * repeats; h++)
                        for (int64_t first = 0; first < t.length[s]; first += ASKED)
                            Asked(t, s, first, h)
                                .backward(room + each * omp_get_thread_num(), part);
                }
            }
    std::free(room);
    return 0;
}

void linear(const Linear *given)
{
    const Linear &l = *given;
    const int64_t wide = l.gated ? LANES : PANEL, panels = (l.columns + wide - 1) / wide;
    const int64_t blocks = (l.rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(l.threads) schedule(static)
    for (int64_t i = 0; i < blocks * panels; i++) {
        const int64_t first = i / panels * BLOCK;
        linear_panel(l, i % panels, first, std::min(first + BLOCK, l.rows));
    }
}

// 0, or 1 where there was no memory. What is packed as a whole is the smaller factor, unless the left
// one lies well: then it need not be.
int product(const Product *given)
{
    const Product &p = *given;
    const bool long_left = p.left_step != 1 && p.rows > p.columns;
    const int64_t whole = long_left        ? (p.columns + PANEL - 1) / PANEL * PANEL * p.depth
                          : p.left_step == 1 ? 0
                                             : (p.rows + PANEL - 1) / PANEL * PANEL * p.depth;
    const int64_t part = (long_left ? PACK : PANEL) * p.depth;
    float *room = (float *)std::aligned_alloc(4 * LANES,
                                              sizeof(float) * (whole + part * p.threads));
    if (!room)
        return 1;
#pragma omp parallel num_threads(p.threads)
    {
        float *mine = room + whole + part * omp_get_thread_num();
        if (long_left)
            by_rows(p, room, mine);
        else
            by_panels(p, room, mine);
    }
    std::free(room);
    return 0;
}

void rms_norm(const float *x, const float *weight, int64_t rows, int64_t size, double eps,
              float *out, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++)
        normalise(x + r * size, weight, size, (float)eps, out + r * size);
}

// With r = 1 / √(mean(x²) + ε) and g = grad ∘ weight: dx = r · g - x · r³ · mean(g ∘ x),
// d_weight = Σ grad ∘ x · r. Every thread has its own row of d_weight, to be added up.
void rms_norm_backward(const float *x, const float *weight, const float *grad, int64_t rows,
                       int64_t size, double eps, float *dx, float *d_weight, int64_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *of = x + r * size, *g = grad + r * size;
        float *mine = d_weight + omp_get_thread_num() * size;
        float squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
        for (int64_t i = 0; i < size; i++)
            squares += of[i] * of[i], dot += g[i] * weight[i] * of[i];
        const float scale = 1.0f / std::sqrt(squares / size + (float)eps);
        const float back = scale * scale * dot / size;
        for (int64_t i = 0; i < size; i++) {
            mine[i] += g[i] * of[i] * scale;
            dx[r * size + i] = scale * (g[i] * weight[i] - of[i] * back);
        }
    }
}

// out = silu(gate) ∘ up
void swiglu(const float *gate, const float *up, int64_t size, float *out, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (size > SMALL)
    for (int64_t i = 0; i < size / LANES * LANES; i += LANES) {
        const Vector x = at(gate + i);
        at(out + i) = x / (exponential(-x) + 1.0f) * at(up + i);
    }
    for (int64_t i = size / LANES * LANES; i < size; i++)
        out[i] = gate[i] / (std::exp(-gate[i]) + 1.0f) * up[i];
}

// With s = 1 / (1 + e^-gate): d_up = grad ∘ gate ∘ s,
// d_gate = grad ∘ up ∘ s ∘ (1 + gate ∘ (1 - s)).
void swiglu_backward(const float *gate, const float *up, const float *grad, int64_t size,
                     float *d_gate, float *d_up, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (size > SMALL)
    for (int64_t i = 0; i < size / LANES * LANES; i += LANES) {
        const Vector x = at(gate + i), g = at(grad + i), s = 1.0f / (exponential(-x) + 1.0f);
        at(d_up + i) = g * x * s;
        at(d_gate + i) = g * at(up + i) * s * (1.0f + x * (1.0f - s));
    }
    for (int64_t i = size / LANES * LANES; i < size; i++) {
        const float x = gate[i], s = 1.0f / (std::exp(-x) + 1.0f);
        d_up[i] = grad[i] * x * s;
        d_gate[i] = grad[i] * up[i] * s * (1.0f + x * (1.0f - s));
    }
}

// x ← e^(x - norm), norm = log Σ e^x, of every row.
void softmax(float *x, int64_t rows, int64_t size, float *norm, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++)
        norm[r] = soften(x + r * size, size);
}

void turn(float *x, int64_t rows, int64_t row, int64_t heads, int64_t dim, const float *cos,
          const float *sin, const int64_t *position, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows * row > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cos + position[r] * dim, *s = sin + position[r] * dim;
        for (int64_t h = 0; h < heads; h++) {
            float *low = x + r * row + h * dim, *high = low + dim / 2;
            for (int64_t i = 0; i < dim / 2; i++) {
                const float a = low[i], b = high[i];
                low[i] = a * c[i] + b * s[i];
                high[i] = b * c[dim / 2 + i] + a * s[dim / 2 + i];
            }
        }
    }
}
}
