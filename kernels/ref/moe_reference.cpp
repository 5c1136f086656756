#include "moe_reference.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace kt {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument("moe_reference: " + message);
}

void check(const MoeReference& l, const double* y) {
  require(l.tokens >= 0 && l.top_k >= 0 && l.num_experts >= 0, "sizes must not be negative");
  require(l.hidden_size > 0 && l.intermediate_size > 0,
          "hidden_size and intermediate_size must be positive");
  require(l.activation == ActivationFormat::kBF16 || l.activation == ActivationFormat::kInt8Row,
          "activation format " + std::to_string(static_cast<int>(l.activation)) +
              "; accepted: 0 (bf16), 1 (int8 per row)");
  if (l.tokens == 0) return;
  require(l.x && y, "x and y are required");
  require(l.top_k == 0 || (l.ids && l.weights), "ids and weights are required");
  require(l.num_experts == 0 || (l.up && l.down), "up and down are required");
}

// The nearest bfloat16 (ties to even) of a double, without an intermediate float32 rounding.
double round_to_bf16(double v) {
  if (!std::isfinite(v) || v == 0) return v;
  int exponent;
  std::frexp(v, &exponent);                      // |v| in [2^(exponent-1), 2^exponent)
  const int ulp = std::max(exponent - 8, -133);  // 8 significant bits; 2^-133: smallest denormal
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(v, -ulp)), ulp);
  return std::abs(rounded) < std::ldexp(1.0, 128) ? rounded : std::copysign(HUGE_VAL, v);
}

// Converts to int8 with a shared scale and back. The arithmetic is float32, as in the kernels.
void round_to_int8(double* v, int64_t n) {
  float absmax = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const float f = static_cast<float>(v[i]);
    finite = finite && std::isfinite(f);
    absmax = std::max(absmax, std::abs(f));
  }
  if (!finite) {
    std::fill(v, v + n, kNaN);
    return;
  }
  // All are zero, or so small that float32 cannot hold the inverse scale.
  const float inverse = 127.0f / absmax;
  if (!std::isfinite(inverse)) {
    std::fill(v, v + n, 0.0);
    return;
  }
  const float scale = absmax / 127.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float q = std::nearbyint(static_cast<float>(v[i]) * inverse);
    v[i] = static_cast<double>(q) * scale;
  }
}

void round_activation(const MoeReference& l, std::vector<double>& row) {
  const auto n = static_cast<int64_t>(row.size());
  switch (l.activation) {
    case ActivationFormat::kBF16:
      for (double& v : row) v = round_to_bf16(v);
      return;
    case ActivationFormat::kInt8Row: round_to_int8(row.data(), n); return;
  }
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

double sigmoid(double v) { return 1 / (1 + std::exp(-v)); }

using Function = double (*)(double);

// Each is the formula as published; the comparison of relu2 lets a NaN pass through.
Function function_of(const std::string& name) {
  constexpr double kPi = 3.14159265358979323846;
  if (name == "silu") return [](double v) { return v * sigmoid(v); };
  if (name == "gelu") return [](double v) { return 0.5 * v * std::erfc(-v / std::sqrt(2.0)); };
  if (name == "gelu_tanh")
    return [](double v) {
      return 0.5 * v * (1 + std::tanh(std::sqrt(2 / kPi) * (v + 0.044715 * v * v * v)));
    };
  if (name == "relu2") return [](double v) { return v < 0 ? 0 : v * v; };
  throw std::invalid_argument(
      "moe_reference: activation \"" + name +
      "\"; accepted: silu, gelu, gelu_tanh, relu2, and with a gate situ and "
      "swiglustep");
}

// The comparisons let a NaN pass through.
double clamp(double v, double least, double most) {
  return v > most ? most : v < least ? least : v;
}

double swiglu(double gate, double up, double limit, double alpha) {
  if (limit > 0) {
    gate = clamp(gate, -HUGE_VAL, limit);
    up = clamp(up, -limit, limit);
  }
  if (alpha != 0) return gate * sigmoid(alpha * gate) * (up + 1);
  return gate * sigmoid(gate) * up;
}

double swiglu_step(double gate, double up, double limit) {
  if (limit > 0) up = clamp(up, -limit, limit);
  return clamp(gate * sigmoid(gate), -HUGE_VAL, limit > 0 ? limit : HUGE_VAL) * up;
}

double situ(double gate, double up, double beta, double linear_beta) {
  if (linear_beta > 0) up = linear_beta * std::tanh(up / linear_beta);
  return beta * std::tanh(gate / beta) * sigmoid(gate) * up;
}

// h of gate and up; without a gate, of up alone.
std::function<double(double, double)> hidden_of(const MoeReference& l) {
  if (l.gate && l.function == "silu")
    return [&](double g, double u) { return swiglu(g, u, l.swiglu_limit, l.swiglu_alpha); };
  require(l.swiglu_alpha == 0, "only silu with a gate has swiglu_alpha");
  if (l.gate && l.function == "swiglustep")
    return [&](double g, double u) { return swiglu_step(g, u, l.swiglu_limit); };
  require(l.swiglu_limit == 0, "only silu and swiglustep with a gate have swiglu_limit");
  if (l.gate && l.function == "situ")
    return [&](double g, double u) { return situ(g, u, l.situ_beta, l.situ_linear_beta); };
  const Function act = function_of(l.function);
  if (l.gate) return [act](double g, double u) { return act(g) * u; };
  return [act](double, double u) { return act(u); };
}

}  // namespace

void moe_reference(const MoeReference& l, double* y) {
  check(l, y);
  const auto hidden = hidden_of(l);
  const int64_t H = l.hidden_size, I = l.intermediate_size;
  std::vector<double> x(static_cast<size_t>(H)), h(static_cast<size_t>(I));
  for (int64_t t = 0; t < l.tokens; ++t) {
    double* y_row = y + t * H;
    std::fill(y_row, y_row + H, 0.0);
    x.assign(l.x + t * H, l.x + (t + 1) * H);
    round_activation(l, x);
    for (int64_t j = 0; j < l.top_k; ++j) {
      const int64_t e = l.ids[t * l.top_k + j];
      if (e < 0 || e >= l.num_experts || (l.skip && l.skip[e])) continue;
      const double weight = l.weights[t * l.top_k + j];
      const double before = l.weight_on_input ? weight : 1, after = l.weight_on_input ? 1 : weight;
      for (int64_t i = 0; i < I; ++i) {
        const int64_t row = e * I + i;
        const auto value = [&](const double* w, const double* bias) {
          return w ? before * dot(w + row * H, x.data(), H) + (bias ? bias[row] : 0) : 0;
        };
        h[static_cast<size_t>(i)] = hidden(value(l.gate, l.gate_bias), value(l.up, l.up_bias));
      }
      round_activation(l, h);
      for (int64_t n = 0; n < H; ++n) {
        const int64_t row = e * H + n;
        const double down =
            dot(l.down + row * I, h.data(), I) + (l.down_bias ? l.down_bias[row] : 0);
        y_row[n] += after * down;
      }
    }
  }
}

}  // namespace kt
