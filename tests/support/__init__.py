"""What tests of several rooms share: models made at test time and the truth about them, paper neighbours."""
