// SPDX-License-Identifier: Apache-2.0
// psi(u) = u + expm1(-u) and chi(u) = 1 - exp(-u) (1 + u): the two gaps every divergence is built
// from. Both are >= 0 and vanish quadratically, which is why no cancelling subtraction is left.
//
// psi, |u| <= 1/2: minimax on psi(u) / u^2; relative error 2.4e-8 (6 terms, float), Taylor with
// truncation 5e-17 (14 terms, double).
#pragma once

#include "trm/portability.h"

namespace trm {

// Beyond this log-ratio a token is "far": its exponentials are formed one by one.
template <typename Real>
TRM_INLINE constexpr Real near_limit() {
  return Real(0.5);
}

TRM_INLINE float psi_near(float u) {
  float series = -0.000198756241f;
  series = series * u + 0.00139819975f;
  series = series * u - 0.00833345218f;
  series = series * u + 0.0416657959f;
  series = series * u - 0.166666655f;
  series = series * u + 0.500000012f;
  return u * u * series;
}

TRM_INLINE double psi_near(double u) {
  // sum over k >= 2 of (-u)^k / k!, from the last term kept (k = 15) down.
  double series = 1.0;
  for (int k = 15; k >= 3; --k) series = 1.0 - series * u / k;
  return 0.5 * u * u * series;
}

// chi from psi: exp(-u) = 1 - u + psi(u).
template <typename Real>
TRM_INLINE Real chi_near(Real u, Real psi) {
  return u * u - psi * (Real(1) + u);
}

}  // namespace trm
