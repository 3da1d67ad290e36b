import colocate
from colocate.testing.roles import RoleSuite, sample


class TestCounter(RoleSuite):
    role = colocate.role("haiku.counter", wanted=5)

    def calls(self):
        return {
            "syllables": sample(["an old silent pond", "splash", "silence again"]),
            "fit": sample([5, 1, 4]),
        }
